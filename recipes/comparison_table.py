"""What a comparison shows: one table with numbered reasons, and what is wrong or slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qat.report import format_table
from qat.tensorrt import Inspection
from qat.tensorrt.inspection import speed_warning
from recipes.cells import FP16, FP32, ORT, TENSORRT, TORCH, Cell
from recipes.config import RunConfig

MIB = 2**20
LEGEND = (
    "torch on a GPU and TensorRT: median of the execution by CUDA events, without copies. torch on a CPU and ONNX "
    "Runtime: median by the clock. Times on different devices are not comparable.",
    "torch runs PTQ and QAT with fake quantization, which simulates INT8 in float: right in accuracy, slow by design.",
    "ONNX Runtime runs on the CPU: accuracy from the file taken literally, latency with its fast settings. Its speed "
    "on a Q/DQ file says nothing about TensorRT's.",
    "TensorRT: FP32 may use TF32 where the GPU has it. INT8 layers: weighted layers in INT8 in every profile.",
    "file MiB: the ONNX file that the backend runs; for torch, the weights in memory.",
)


@dataclass(frozen=True)
class Table:
    """Texts of a table; "- [2]" in a row refers to the second of the `reasons`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...]

    def text(self, title: str) -> str:
        """For the terminal."""
        numbered = [f"[{number}] {reason}" for number, reason in enumerate(self.reasons, 1)]
        return "\n".join([format_table(title, self.columns, self.rows), *numbered])


def find(cells: Sequence[Cell], model: str, backend: str) -> Cell | None:
    """The cell of a model on a backend."""
    return next((cell for cell in cells if (cell.model, cell.backend) == (model, backend)), None)


def make_table(cells: Sequence[Cell], batches: Sequence[int]) -> Table:
    """One row a cell; latency for the smallest and the largest batch."""
    shown = sorted({min(batches), max(batches)})
    reasons: list[str] = []
    base = find(cells, FP32, TORCH)
    rows = tuple(_row(cell, base, shown, reasons) for cell in cells)
    milliseconds = [f"ms, batch {batch}" for batch in shown]
    columns = ("model", "runs on", "top-1 %", "vs FP32", *milliseconds, f"samples/s, batch {shown[-1]}")
    return Table((*columns, "file MiB", "engine MiB", "INT8 layers"), rows, tuple(reasons))


def _row(cell: Cell, base: Cell | None, batches: Sequence[int], reasons: list[str]) -> tuple[str, ...]:
    def absent(*parts: str) -> str:
        reason = next((cell.why[part] for part in parts if part in cell.why), "")
        if reason and reason not in reasons:
            reasons.append(reason)
        return f"- [{reasons.index(reason) + 1}]" if reason else "-"

    def timed(batch: int, key: str) -> str:
        latency = cell.latency.get(str(batch))
        return f"{latency[key]:.2f}" if latency else absent(f"batch {batch}", "file", "engine", "execution")

    top1 = cell.metrics["top1"] if cell.metrics else None
    accuracy = absent("accuracy", "file", "engine", "execution") if top1 is None else f"{top1:.2f}"
    engine, layers = "", ""
    if cell.backend == TENSORRT:
        built = cell.engine
        engine = f"{built['engine_bytes'] / MIB:.2f}" if built else absent("engine", "file")
        layers = coverage(cell) if built else absent("engine", "file")
    return (
        cell.model,
        cell.backend,
        accuracy,
        f"{top1 - base.metrics['top1']:+.2f}" if top1 is not None and base and base.metrics else "-",
        *(timed(batch, "median_ms") for batch in batches),
        timed(batches[-1], "throughput"),
        absent("file") if cell.bytes is None else f"{cell.bytes / MIB:.2f}",
        engine,
        layers,
    )


def coverage(cell: Cell) -> str:
    """INT8 layers of a built engine."""
    built = cell.engine
    return f"{built['int8_layers']}/{built['weighted_layers']} = {built['int8_coverage_percent']:.1f} %"


def speed_warnings(cells: Sequence[Cell], inspections: Mapping[str, Inspection]) -> list[str]:
    """A sentence for each INT8 engine and batch that FP16 beats, with the layers to look at; else why nobody knows."""
    half = find(cells, FP16, TENSORRT)
    if half is None or not half.latency:
        reason = next(iter(half.why.values()), "") if half else "it was not compared"
        return [f"Whether INT8 beats FP16 is not known: no FP16 engine was timed ({reason})."]
    found = []
    for cell in cells:
        if cell.backend != TENSORRT or cell.model in (FP32, FP16):
            continue
        for batch, latency in cell.latency.items():
            if batch not in half.latency:
                continue
            fp16_ms = half.latency[batch]["median_ms"]
            warning = speed_warning(latency["median_ms"], fp16_ms, inspections[cell.model])
            if warning:
                found.append(f"{cell.model}, batch {batch}: {warning}{_graph_note(cell, half, batch)}")
    return found


def _graph_note(cell: Cell, half: Cell, batch: str) -> str:
    """A hint where only starting the kernels keeps INT8 from being faster."""
    int8, fp16 = (c.timings.get(batch, {}).get("cuda_graph") for c in (cell, half))
    if not int8 or not fp16 or int8["median_ms"] >= fp16["median_ms"]:
        return ""
    return (
        f" As CUDA graphs INT8 takes {int8['median_ms']:.3f} ms and FP16 {fp16['median_ms']:.3f} ms: without them, "
        "starting the kernels is what takes the time."
    )


def problems(cells: Sequence[Cell], config: RunConfig) -> list[str]:
    """Sentences for every file or engine that is less accurate than its torch model, or has too little INT8."""
    found = []
    for cell in cells:
        base = find(cells, cell.model, TORCH)
        partial = cell.backend == ORT and config.export.eval_images is not None
        if base and base.metrics and cell.metrics and not partial:
            loss = base.metrics["top1"] - cell.metrics["top1"]
            if loss > config.export.threshold:
                found.append(
                    f"{cell.model} on {cell.backend} is {loss:.2f} points below torch; {config.export.threshold:g} are "
                    "allowed (export.threshold)."
                )
        least = config.tensorrt.min_int8
        if least is not None and cell.engine and cell.model not in (FP32, FP16):
            percent = cell.engine["int8_coverage_percent"]
            if percent < least:
                found.append(f"{cell.model}: {percent:.1f} % of the layers are INT8; tensorrt.min_int8 is {least:g}.")
    return found
