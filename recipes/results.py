"""A classification run's results: one JSON, one table, one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import yaml

from qat.calibration import MethodResult
from qat.files import atomic_write, write_json
from qat.report import environment, format_table, plot_accuracies
from qat.training import TrainResult
from recipes.config import RunConfig, to_plain

Results = dict[str, Any]


def start(config: RunConfig, device: str) -> Results:
    """Results that say what made them."""
    return {"config": to_plain(config), "device": device, "environment": environment()}


def name_of(config: RunConfig) -> str:
    """The data and the network in a file's name: "digits_resnet18", or with the folder's name "cifar10_resnet18"."""
    data = config.data
    folder = data.dir.resolve().name if data.name == "imagefolder" and data.dir else data.name
    return f"{folder}_{config.model.name}"


def ptq_entries(results: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """Plain values of a comparison of calibration methods."""
    return [{"method": r.method, "metrics": r.metrics} for r in results]


def qat_entry(seed: int, result: TrainResult) -> dict[str, Any]:
    """Plain values of one fine-tuning run: the best epoch, the last one, and every epoch between."""
    return {
        "seed": seed,
        "best_epoch": result.best_epoch,
        "metrics": result.metrics,
        "last": result.history[-1]["metrics"],
        "history": list(result.history),
    }


def rows(results: Results) -> list[tuple[str, list[dict[str, float]]]]:
    """(name, metrics of each seed) for float, each PTQ method, QAT and ONNX, as far as they were run."""
    found = [("float", [results["float"]])] if "float" in results else []
    found += [(f"PTQ {entry['method']}", [entry["metrics"]]) for entry in results.get("ptq", [])]
    if results.get("qat"):
        found.append(("QAT", [entry["metrics"] for entry in results["qat"]]))
    if "onnx" in results:
        found.append((f"ONNX (QAT seed {results['onnx']['seed']})", [results["onnx"]["metrics"]]))
    return found


def table_lines(results: Results) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: top-1, its distance to float, top-5 and loss; several seeds as mean and standard deviation."""
    base = results["float"]["top1"] if "float" in results else float("nan")
    lines = []
    for name, runs in rows(results):
        top1 = [run["top1"] for run in runs]
        lines.append(
            [
                label(name, runs),
                spread(top1),
                f"{mean(top1) - base:+.2f}",
                f"{mean(run['top5'] for run in runs):.2f}",
                f"{mean(run['val_loss'] for run in runs):.4f}",
            ]
        )
    columns = ["model", "top-1 %", "vs float", "top-5 %", "val loss"]
    if "int8_layers" in results.get("tensorrt", {}):
        columns.append("INT8 layers in TensorRT")
        for line in lines:
            line.append(_coverage(results) if line[0].startswith("ONNX") else "")
    return columns, lines


def title(results: Results) -> str:
    """Model, data, image size and device."""
    model, data = results["config"]["model"], results["config"]["data"]
    return f"{model['name']} on {data['name']}, {data['image_size']} px, {results['device']}"


def table(results: Results) -> str:
    """`table_lines` as text under the title."""
    return format_table(title(results), *table_lines(results))


def _coverage(results: Results) -> str:
    entry = results["tensorrt"]
    return f"{entry['int8_layers']} of {entry['weighted_layers']} ({entry['int8_coverage_percent']:.1f} %)"


def label(name: str, runs: Sequence[Any]) -> str:
    """The name of a row, with the number of its runs where there are several."""
    return f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name


def spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation where there are several."""
    return f"{mean(values):.2f}" + (f" +- {pstdev(values):.2f}" if len(values) > 1 else "")


def write(results: Results, folder: Path) -> Path:
    """Write results.json, and config.yaml that makes the run again, into its folder; returns the JSON's path."""
    with atomic_write(folder / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(results["config"], sort_keys=False))
    write_json(folder / "results.json", results)
    return folder / "results.json"


def save(results: Results, folder: Path) -> Path:
    """Write results.json, config.yaml and results.png into the run's folder; returns the JSON's path."""
    bars = [(name, mean(r["top1"] for r in runs), pstdev(r["top1"] for r in runs)) for name, runs in rows(results)]
    history = results["qat"][0]["history"] if results.get("qat") else []
    plot_accuracies(folder / "results.png", bars, history, results["config"]["model"]["name"])
    return write(results, folder)
