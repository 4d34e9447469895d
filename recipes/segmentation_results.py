"""A segmentation run's results over its seeds: rows, one table, one picture of the accuracies."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, pstdev

from qat.report import environment, format_table, plot_accuracies
from recipes.config import to_plain
from recipes.results import Results, label, spread, write
from recipes.segmentation_config import SegmentationConfig

MOST_COLUMNS = 8
Metrics = dict[str, float]


def start(config: SegmentationConfig) -> Results:
    """Results that say what made them."""
    return {"config": to_plain(config), "environment": environment(), "seeds": []}


def rows(results: Results) -> list[tuple[str, list[Metrics]]]:
    """(name, metrics of each seed) for float, each PTQ method and QAT; ONNX Runtime or TensorRT for the first seed."""
    seeds = results["seeds"]
    found = [("float", [entry["float"] for entry in seeds])]
    for number, method in enumerate(result["method"] for result in seeds[0]["ptq"]):
        found.append((f"PTQ {method}", [entry["ptq"][number]["metrics"] for entry in seeds]))
    found.append(("QAT", [entry["qat"]["metrics"] for entry in seeds]))
    if "deployment" in results:
        seed, run = seeds[0]["seed"], results["deployment"]
        found.append((f"{run['backend']} (QAT seed {seed})", [run["metrics"]]))
    return found


def table_lines(results: Results) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: metrics as mean and standard deviation over the seeds, and Dice against float.

    With many classes only the means over them; results.json has all.
    """
    names = list(results["seeds"][0]["float"])
    if len(names) > MOST_COLUMNS:
        names = [name for name in names if name in ("dice", "miou")]
    base = [entry["float"]["dice"] for entry in results["seeds"]]
    lines = []
    for name, runs in rows(results):
        against = mean(run["dice"] - value for run, value in zip(runs, base, strict=False))
        cells = [_cell([run[metric] for run in runs if metric in run]) for metric in names]
        lines.append([label(name, runs), cells[0], f"{against:+.2f}", *cells[1:]])
    return ["model", names[0], "vs float", *names[1:]], lines


def _cell(values: list[float]) -> str:
    return spread(values) if values else "-"


def title(results: Results) -> str:
    """Network, data and device."""
    model, data = results["config"]["model"], results["config"]["data"]
    encoder = "" if "_" in model["name"] else f" ({model['encoder']})"
    where = results["seeds"][0]["device"]
    return f"{model['name']}{encoder} on {data['name']}, {where}: Dice and IoU in %"


def table(results: Results) -> str:
    """`table_lines` as text under the title."""
    return format_table(title(results), *table_lines(results))


def save(results: Results, folder: Path) -> Path:
    """Write results.json, config.yaml and results.png into the run's folder; returns the JSON's path."""
    found = [(name, [run["dice"] for run in runs]) for name, runs in rows(results)]
    bars = [(name, mean(values), pstdev(values)) for name, values in found]
    history = results["seeds"][0]["qat"]["history"]
    plot_accuracies(folder / "results.png", bars, history, results["config"]["data"]["name"], "dice")
    return write(results, folder)
