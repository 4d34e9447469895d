"""Pictures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qat.files import atomic_write

COLOURS = {"float": "#4c566a", "PTQ": "#d08770", "QAT": "#5e81ac", "ONNX": "#a3be8c"}


def plot_accuracies(
    path: str | Path,
    rows: Sequence[tuple[str, float, float]],
    history: Sequence[Mapping[str, Any]] = (),
    title: str = "",
    metric: str = "top1",
) -> None:
    """Bars of (name, accuracy in %, standard deviation), and the curve of `metric` over the epochs where there is one.

    The bars' axis starts just below the smallest value, as differences of tenths of a point are what one looks for.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2 if history else 1, squeeze=False)[0]
    names, values, errors = [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]
    colours = [next((c for key, c in COLOURS.items() if name.startswith(key)), "#999999") for name in names]
    bars = axes[0].bar(names, values, yerr=[e or float("nan") for e in errors], color=colours, capsize=4)
    axes[0].bar_label(bars, fmt="%.2f", fontsize=8)
    low, high = min(values), max(values)
    axes[0].set_ylim(max(low - 0.25 * (high - low) - 0.5, 0), high + 0.15 * (high - low) + 0.3)
    axes[0].set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    axes[0].set_ylabel(f"{metric} %, axis cut")
    axes[0].set_title(title)
    if history:
        epochs = [entry["epoch"] for entry in history]
        axes[1].plot(epochs, [entry["metrics"][metric] for entry in history], marker="o", color=COLOURS["QAT"])
        axes[1].set_xlabel("epoch of fine-tuning")
        axes[1].xaxis.get_major_locator().set_params(integer=True)
        axes[1].set_ylabel(f"{metric} %")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
