"""Accuracies of a run, and its training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qat.report.figures import COLOURS, GREY, new_figure, plain_text, save_png

History = Sequence[Mapping[str, Any]]
"""Records of epochs, as fine_tune writes them."""


def plot_accuracies(
    path: str | Path,
    rows: Sequence[tuple[str, float, float]],
    history: History = (),
    title: str = "",
    metric: str = "top1",
) -> None:
    """Bars of (name, accuracy in %, standard deviation), and the curve of `metric` over the epochs where there is one.

    The bars' axis starts just below the smallest value, as differences of tenths of a point are what one looks for.
    """
    figure = new_figure(10, 4)
    axes = figure.subplots(1, 2 if history else 1, squeeze=False)[0]
    _draw_accuracies(axes[0], rows, title, metric)
    if history:
        _draw_curve(axes[1], history, lambda entry: entry["metrics"][metric], "QAT", COLOURS["QAT"])
        axes[1].set_xlabel("epoch of fine-tuning")
        axes[1].set_ylabel(f"{metric} %")
    save_png(figure, path)


def accuracy_figure(rows: Sequence[tuple[str, float, float]], metric: str) -> Any:
    """The bars alone."""
    figure = new_figure(9, 4)
    _draw_accuracies(figure.subplots(), rows, "", metric)
    return figure


def curves_figure(runs: Mapping[str, History], metric: str) -> Any:
    """`metric` and training loss over the epochs, one row of two charts a kind of run (the name's first word)."""
    kinds = list(dict.fromkeys(name.split()[0] for name in runs))
    figure = new_figure(11, 3.2 * len(kinds))
    for row, kind in zip(figure.subplots(len(kinds), 2, squeeze=False), kinds, strict=True):
        shades = [COLOURS.get(kind, GREY), "#88c0d0", "#b48ead", "#ebcb8b", "#a3be8c"]
        for number, (name, history) in enumerate((n, h) for n, h in runs.items() if n.split()[0] == kind):
            colour = shades[number % len(shades)]
            _draw_curve(row[0], history, lambda entry: entry["metrics"][metric], name, colour)
            _draw_curve(row[1], history, lambda entry: entry["loss"], name, colour)
        for axes, label in zip(row, (metric, "training loss"), strict=True):
            axes.set_xlabel("epoch")
            axes.set_ylabel(label)
            axes.legend(fontsize=8)
    return figure


def _draw_accuracies(axes: Any, rows: Sequence[tuple[str, float, float]], title: str, metric: str) -> None:
    names, values, errors = [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]
    colours = [next((c for key, c in COLOURS.items() if name.startswith(key)), GREY) for name in names]
    bars = axes.bar(range(len(names)), values, yerr=[e or float("nan") for e in errors], color=colours, capsize=4)
    axes.bar_label(bars, fmt="%.2f", fontsize=8)
    low, high = min(values), max(values)
    axes.set_ylim(max(low - 0.25 * (high - low) - 0.5, 0), high + 0.15 * (high - low) + 0.3)
    labels = [plain_text(name) for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_ylabel(f"{metric} %, axis cut")
    axes.set_title(plain_text(title))


def _draw_curve(axes: Any, history: History, value: Any, name: str, colour: str) -> None:
    epochs = [entry["epoch"] for entry in history]
    values = [float("nan") if (found := value(entry)) is None else found for entry in history]
    axes.plot(epochs, values, marker="o", markersize=4, color=colour, label=plain_text(name))
    axes.xaxis.get_major_locator().set_params(integer=True)
