#!/usr/bin/env python
"""Five networks that know nothing of qat, from float to Q/DQ ONNX and an INT8 engine, none of them changed.

    OMP_NUM_THREADS=2 python examples/quantize_all.py                      # all; some five minutes on two cores
    python examples/quantize_all.py --only pointnet --steps 20 --results runs/strangers.json   # a quick look

Each file beside this one trains its own network on data that it draws. Here the network is trained, given quantizers
by `qat.prepare`, calibrated by the best of four methods, fine-tuned for a few steps by the same loop, exported, linted,
compared with ONNX Runtime, and built by tensorrt-rtx, which needs no GPU for that; INT8 layers are read from its build
log. results/strangers.json is written after each network. Exit status 1 where a network fails, a linter warns or a
quantized layer runs in float; scores are for people to judge.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import qat
from qat.errors import EngineError
from qat.files import write_json
from qat.onnx.lint import Severity, lint
from qat.placement.rules import DEFAULT_RULES, QUANTIZE, Rule
from qat.report import environment, format_table
from qat.sqnr import Sqnr
from rtx_counts import count

ROOT = Path(__file__).resolve().parents[1]
NETWORKS = ("yolo_detector", "super_resolution", "audio_tcn", "pointnet", "lstm_tagger")
RULES = {"lstm_tagger": (Rule("lstm", QUANTIZE, ("recurrent",)), *DEFAULT_RULES)}
"""Recurrent layers are float by default; in a tagger there is nothing else to quantize."""
FINE_TUNE = 0.15
"""Steps and learning rate of the fine-tuning, relative to the float training."""
CHOOSING_SEED = 7
"""Of the data on which the calibration method is chosen; the scores reported are of other data."""
FIRST_STEP_ZERO = {"lstm_tagger": 2}
"""Quantized products that TensorRT may run in float: the zero state in front of the first step, in both directions."""


def main(args: list[str]) -> int:
    """Exit status 0 where every network passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--steps", type=int, help="float training steps instead of each network's own number")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "strangers.json")
    options = parser.parse_args(args)
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {"environment": environment(), "steps": options.steps, "networks": {}}
    for name in (bar := tqdm(options.only, "networks")):
        bar.set_postfix_str(name)
        report["networks"][name] = quantize(name, options.steps)
        write_json(options.results, report)
    rows = report["networks"]
    print(table(rows))
    failed = [name for name, row in rows.items() if not passed(name, row)]
    print("\n".join(f"FAILED: {name}" for name in failed) or "every network passed")
    return 1 if failed else 0


def passed(name: str, row: dict[str, Any]) -> bool:
    """Lint-clean, equal to torch, and no quantized layer in float but those known."""
    engine = row["rtx"]
    lost = 0 if engine is None else len(engine["lost"])
    return not row["lint_warnings"] and row["parity"] and lost <= FIRST_STEP_ZERO.get(name, 0)


def quantize(name: str, steps: int | None) -> dict[str, Any]:
    """The row of one network."""
    module = importlib.import_module(name)
    torch.manual_seed(0)
    model: nn.Module = module.Network()
    settings = {} if steps is None else {"steps": steps}
    module.train(model, **settings)
    held_out = module.make_batch(64, 0)[0]
    with torch.no_grad():
        expected = tensors(model(held_out))
    row: dict[str, Any] = {"score": module.SCORE, "parameters": sum(p.numel() for p in model.parameters())}
    row["float"] = module.score(model)

    example = module.make_batch(4, 1)[0]
    qat.prepare(model, example, rules=RULES.get(name, DEFAULT_RULES))
    qat.use_histograms(model)
    qat.collect_stats(model, [module.make_batch(32, 500 + i)[0] for i in range(4)], progress=False)
    tried = qat.compare_methods(model, lambda tried: {"score": module.score(tried, CHOOSING_SEED)}, "score")
    row["methods"] = {result.method: result.metrics["score"] for result in tried}
    row["ptq"] = module.score(model)
    row["ptq_sqnr_db"] = sqnr(expected, model, held_out)
    fine_tune(module, model, steps)
    row["qat"] = module.score(model)
    row["qat_sqnr_db"] = sqnr(expected, model, held_out)
    found = qat.summary(model)
    row["quantizers"] = len(found.quantizers)
    row["left_float"] = found.left_float
    with tempfile.TemporaryDirectory() as folder:
        return {**row, **export(model, example, held_out, Path(folder))}


def fine_tune(module: Any, model: nn.Module, steps: int | None) -> None:
    """The network's own training loop, shorter and slower."""
    defaults = dict(zip(("steps", "lr"), module.train.__defaults__, strict=True))
    whole = defaults["steps"] if steps is None else steps
    module.train(model, max(int(FINE_TUNE * whole), 2), FINE_TUNE * defaults["lr"])


def tensors(output: Any) -> list[Tensor]:
    """A network's outputs as a list."""
    return [output] if isinstance(output, Tensor) else list(output)


def sqnr(expected: list[Tensor], model: nn.Module, x: Tensor) -> float:
    """Decibels of the outputs against those of the float network, all outputs together."""
    total = Sqnr()
    with torch.no_grad():
        for reference, other in zip(expected, tensors(model(x)), strict=True):
            total.add(reference, other)
    return round(total.db, 2)


def export(model: nn.Module, example: Tensor, held_out: Tensor, folder: Path) -> dict[str, Any]:
    """A file with a dynamic batch is compared with torch; one in half precision and of a fixed batch is built."""
    path, fixed = folder / "model.onnx", folder / "fixed.onnx"
    written = qat.export(model, example, path, verify=False)
    parity = qat.check_parity(model, path, [held_out])
    qat.export(model, example, fixed, precision="fp16", dynamic_batch=False, verify=False)
    findings = [finding for file in (path, fixed) for finding in lint(file).findings]
    return {
        "bytes": written.size,
        "parity": parity.passed and not parity.unmatched,
        "worst_layer": max(layer.relative for layer in parity.layers),
        "mismatched_codes": sum(layer.mismatched for layer in parity.layers),
        "onnxruntime_sqnr_db": [round(min(o.sqnr_db, 999.0), 1) for o in parity.outputs],
        "lint_warnings": [str(finding) for finding in findings if finding.severity >= Severity.WARNING],
        "lint_infos": dict(Counter(f.rule for f in findings if f.severity is Severity.INFO)),
        "rtx": build(fixed),
    }


def build(path: Path) -> dict[str, Any] | None:
    """What TensorRT for RTX makes of the file, None where it is not installed; see benchmarks/rtx_counts.py."""
    from qat.tensorrt import BuildOptions, OnnxGraph, build_engine, inspect_layers, load_library

    try:
        library = load_library("tensorrt_rtx")
    except EngineError:
        return None
    built = build_engine(path, BuildOptions(compute_capabilities=("8.9",)), library=library)
    graph = OnnxGraph.load(path)
    inspection = inspect_layers(built.layers, graph)
    concats = {node.name for node in graph.nodes if node.op_type == "Concat"}
    alone = {name for layer in inspection.standalone_qdq for name in layer.onnx_nodes}
    return {**count(graph, inspection), "requantized_concats": sorted(concats & alone)}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """One line a network."""
    columns = ("network", "score", "float", "PTQ", "QAT", "QAT dB", "INT8 of Q/DQ", "float layers", "requantized")
    cells = []
    for name, row in rows.items():
        engine = row["rtx"]
        int8 = ("-", "-", "-") if engine is None else (
            f"{engine['int8']} of {engine['quantized']}", str(engine["float"]),
            f"{engine['requantized_adds']} adds, {len(engine['requantized_concats'])} concats",
        )  # fmt: skip
        scores = [f"{row[key]:.2f}" for key in ("float", "ptq", "qat", "qat_sqnr_db")]
        cells.append([name, row["score"], *scores, *int8])
    return format_table("Five networks from float to INT8", columns, cells)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
