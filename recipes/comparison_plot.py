"""The pictures of a comparison, as one SVG without references to other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qat.report.figures import GREY, RED, new_figure, plain_text, to_svg
from recipes.cells import BACKENDS, ORT, TENSORRT, TORCH, Cell

MIB = 2**20
ENGINE, FILE = "TensorRT engine", "ONNX file"
COLOURS = {TORCH: "#4c566a", ORT: "#d08770", TENSORRT: "#76b900", ENGINE: "#76b900", FILE: "#d08770"}
Series = Mapping[str, Mapping[str, float | None]]
"""Name of a bar's colour -> model -> value; None where there is none."""


def panels(cells: Sequence[Cell], batches: Sequence[int]) -> dict[str, Series]:
    """Title -> what is drawn."""
    small, large = str(min(batches)), str(max(batches))

    def by_backend(value: Any) -> Series:
        return {b: {c.model: value(c) for c in cells if c.backend == b} for b in BACKENDS}

    def statistic(batch: str, key: str) -> Series:
        return by_backend(lambda c: c.latency[batch][key] if batch in c.latency else None)

    built = [c for c in cells if c.backend == TENSORRT]
    sizes: Series = {
        FILE: {c.model: c.bytes / MIB if c.bytes is not None else None for c in built},
        ENGINE: {c.model: c.engine["engine_bytes"] / MIB if c.engine else None for c in built},
    }
    share: Series = {TENSORRT: {c.model: c.engine["int8_coverage_percent"] if c.engine else None for c in built}}
    return {
        "top-1 accuracy, %, axis cut": by_backend(lambda c: c.metrics["top1"] if c.metrics else None),
        f"median latency, ms, batch {small}, logarithmic": statistic(small, "median_ms"),
        f"samples/s, batch {large}, logarithmic": statistic(large, "throughput"),
        "MiB on disk for TensorRT": sizes,
        "weighted layers in INT8, %": share,
    }


def draw_svg(cells: Sequence[Cell], batches: Sequence[int]) -> str:
    """An <svg> element."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    drawn = panels(cells, batches)
    figure = new_figure(15, 3 + 0.75 * len(models))
    axes = figure.subplots(2, 3).ravel()
    for axis, (title, series) in zip(axes, drawn.items(), strict=False):
        _draw(axis, title, models, series)
    for axis in axes[len(drawn) :]:
        axis.set_visible(False)
    return to_svg(figure)


def _draw(axis: Any, title: str, models: Sequence[str], series: Series) -> None:
    present = {name: values for name, values in series.items() if any(v is not None for v in values.values())}
    absent = [name for name in series if name not in present]
    height = 0.8 / max(len(present), 1)
    for number, (name, values) in enumerate(present.items()):
        rows = [(row, values[model]) for row, model in enumerate(models) if values.get(model) is not None]
        places = [row + (number - (len(present) - 1) / 2) * height for row, _ in rows]
        colour = COLOURS.get(name, GREY)
        bars = axis.barh(places, [value for _, value in rows], height, label=name, color=colour)
        axis.bar_label(bars, fmt="%.4g", fontsize=7, padding=2)
    found = [v for values in present.values() for v in values.values() if v is not None]
    if found and "axis cut" in title:
        low, high = min(found), max(found)
        axis.set_xlim(max(low - 0.25 * (high - low) - 0.5, 0), high + 0.15 * (high - low) + 0.3)
    elif found and "logarithmic" in title and min(found) > 0:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter("")
    axis.margins(x=0.15)
    axis.set_yticks(range(len(models)), [plain_text(model) for model in models], fontsize=8)
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(title, fontsize=10)
    if present:
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=3, frameon=False)
    if absent:
        note = f"no value: {', '.join(absent)}"
        axis.text(0.99, 0.01, note, transform=axis.transAxes, ha="right", va="bottom", fontsize=8, color=RED)
