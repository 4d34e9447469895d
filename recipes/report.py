"""The report of a classification run: what results.json, the checkpoints and an analysis of sensitivity have to say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import yaml
from torch import nn

import qat
from qat.debug import LayerSqnr, TensorStatistics, layer_sqnr, tensor_statistics
from qat.errors import ConfigError
from qat.report.figures import to_svg
from qat.report.page import Section, Table
from qat.report.plots import History, accuracy_figure, curves_figure
from qat.report.quantization import histogram_figure, layer_figure
from recipes import results as res
from recipes.classification import Classification
from recipes.sensitivity import conclusion, pareto_of, sensitivity_of

SHOWN = {False: 16, True: 8}
"""Histograms on a page: so many activations and so many weights (True), those with the most noise."""
SAMPLES = 4
"""Images for the noise by layer, which holds every activation in memory."""


def read_json(path: Path) -> Any:
    """A JSON file's content; None where there is none.

    Raises:
        ConfigError: it is damaged.
    """
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not readable JSON ({error}). Run the script that wrote it again.") from error


def accuracy_section(results: res.Results) -> Section:
    """The accuracies as a chart and a table, and what became of the exported file."""
    bars = [(name, mean(r["top1"] for r in runs), pstdev(r["top1"] for r in runs)) for name, runs in res.rows(results)]
    notes = ["Float and QAT rows show the epoch that was best on the validation images."]
    if "onnx" in results:
        export = results["onnx"]["export"]
        notes.append(
            f"ONNX file {results['onnx']['file']}: opset {export['opset']}, {export['bytes'] / 2**20:.1f} MiB, "
            f"{export['codes_that_differ']} integer codes differ from torch."
        )
    if "tensorrt" in results:
        from recipes.engines import tensorrt_line

        notes.append(tensorrt_line(results["tensorrt"]))
    columns, lines = res.table_lines(results)
    return Section("Accuracy", notes, [to_svg(accuracy_figure(bars, "top1"))], [Table(columns, lines)])


def curves_section(results: res.Results, folder: Path) -> Section:
    """Metric and loss by epoch, of the float model and of each seed of QAT."""
    runs: dict[str, History] = {}
    if history := read_json(folder / "float" / "history.json"):
        runs["float"] = history
    runs |= {f"QAT seed {entry['seed']}": entry["history"] for entry in results.get("qat", [])}
    if not runs:
        return Section("Training", ["Nothing was trained in this folder."])
    notes = [] if "float" in runs else ["The float model was not trained in this folder."]
    return Section("Training", notes, [to_svg(curves_figure(runs, "top1"))])


def pick_checkpoint(config: Any, folder: Path) -> Path | None:
    """The fine-tuned model of the first seed, else the calibrated one, else None."""
    found = [folder / "qat" / f"seed{config.qat.seeds[0]}" / "model.pt", folder / "ptq" / "model.pt"]
    return next((path for path in found if path.is_file()), None)


def model_sections(run: Classification, model: nn.Module, batches: int) -> list[Section]:
    """Noise by layer, histograms and the list of quantizers, measured now on calibration images."""
    images = next(iter(run.data.calibration))[0][:SAMPLES]
    layers = layer_sqnr(model, [images])
    statistics = tensor_statistics(model, run.data.calibration, num_batches=batches)
    return [layer_section(layers), histogram_section(statistics), quantizer_section(qat.summary(model), statistics)]


def layer_section(rows: Sequence[LayerSqnr]) -> Section:
    """SQNR by layer."""
    lines = [[r.name or "output", "" if r.own_db is None else f"{r.own_db:.1f}", f"{r.total_db:.1f}"] for r in rows]
    notes = [
        f"Signal-to-quantization-noise ratio, on {SAMPLES} calibration images, against the same model with its "
        "quantizers passing through. A layer whose own ratio is low adds noise; where only the other falls, the noise "
        "comes from before."
    ]
    table = Table(["layer", "alone, dB", "everything, dB"], lines, "every layer", folded=True)
    return Section("Noise by layer", notes, [to_svg(layer_figure(rows))], [table])


def histogram_section(statistics: Sequence[TensorStatistics]) -> Section:
    """Histograms of the noisiest tensors."""
    ordered = sorted(statistics, key=lambda tensor: tensor.sqnr_db)
    worst = [t for weight, most in SHOWN.items() for t in [t for t in ordered if t.weight is weight][:most]]
    notes = [
        f"{len(worst)} of {len(statistics)} tensors, those with the lowest ratio: activations blue, weights orange. "
        "The red line is the clipping point, amax. A bulk far to its left wastes resolution; a tail to its right is "
        "clipped."
    ]
    return Section("Histograms", notes, [to_svg(histogram_figure(worst))])


def quantizer_section(summary: qat.Summary, statistics: Sequence[TensorStatistics]) -> Section:
    """Every quantizer, every layer left float with its reason, and what placement could not see."""
    measured = {tensor.name: tensor for tensor in statistics}
    lines = []
    for row in summary.quantizers:
        tensor = measured.get(row.name)
        lines.append([
            row.name,
            ", ".join(row.tensors),
            ", ".join(row.readers) if len(row.readers) > 1 else "",
            row.state,
            "tensor" if row.axis is None else f"axis {row.axis}",
            _span(row.amax),
            f"{tensor.sqnr_db:.1f}" if tensor else "",
            f"{100 * tensor.clipped:.3g}" if tensor else "",
            "; ".join(filter(None, (row.reason, f"{len(row.dead)} dead channels" if row.dead else ""))),
        ])  # fmt: skip
    columns = ["quantizer", "tensor", "shared by", "state", "scales", "amax", "SQNR dB", "clipped %", "note"]
    tables = [Table(columns, lines, f"{len(lines)} quantizers", folded=True, text=(1, 2, 3, 4, 8))]
    if summary.left_float:
        rows = [list(item) for item in summary.left_float.items()]
        tables.append(Table(["layer or operation", "why"], rows, f"{len(rows)} left float", True, (1,)))
    return Section("Quantizers", [f"{name or 'the model'}: {note}" for name, note in summary.notes.items()], (), tables)


def _span(values: tuple[float, float] | None) -> str:
    if values is None:
        return ""
    return f"{values[0]:.4g}" if values[0] == values[1] else f"{values[0]:.4g} to {values[1]:.4g}"


def sensitivity_section(folder: Path) -> Section:
    """What scripts/sensitivity.py found, if it was run."""
    results = read_json(folder / "sensitivity" / "sensitivity.json")
    if results is None:
        return Section("Sensitivity", ["It was not analysed. scripts/sensitivity.py does it."])
    ranking = results["ranking"]
    lines = [
        [row["name"], ", ".join(row["members"]), _score(row["score"]), _score(row["metrics"][ranking["metric"]])]
        for row in ranking["rows"]
    ]
    tables = [Table([ranking["level"], "members", "score", ranking["metric"]], lines, "every row", True, (1,))]
    if "points" in results.get("engines", {}):
        tables.append(_engines(results["engines"]))
    notes = [line for line in conclusion(results).splitlines() if line]
    if "skipped" in results.get("engines", {}):
        notes.append(f"No engines were built: {results['engines']['skipped']}")
    return Section("Sensitivity", notes, [to_svg(sensitivity_of(results)), to_svg(pareto_of(results))], tables)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _engines(entry: Mapping[str, Any]) -> Table:
    lines = []
    for point in entry["points"]:
        engine = point["engine"]
        latency = engine["not_executed"] if point["latency_ms"] is None else f"{point['latency_ms']:.3f}"
        built = f"{engine['int8_layers']} of {engine['weighted_layers']}"
        numbers = [f"{point['coverage']:.1f}", f"{point['value']:.2f}"]
        lines.append([", ".join(point["float"]) or "nothing", *numbers, built, latency])
    columns = ["left float", "% of MACs in INT8", "top-1 %", "weighted layers that TensorRT runs in INT8",
               f"median ms, batch {entry['batch']}"]  # fmt: skip
    return Table(columns, lines, "Engines of choices on the Pareto front", text=(4,))


def settings_section(results: res.Results) -> Section:
    """What made the numbers."""
    text = yaml.safe_dump({k: results[k] for k in ("environment", "config")}, sort_keys=False)
    return Section("Environment and configuration", listing=text)
