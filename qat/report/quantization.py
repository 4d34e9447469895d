"""Charts about quantizers: histograms with their clipping points, sensitivity, accuracy against coverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qat.debug.layers import LayerSqnr
from qat.debug.tensors import TensorStatistics
from qat.report.figures import COLOURS, GREY, RED, new_figure, plain_text, shortened

COLUMNS = 4


def histogram_figure(statistics: Sequence[TensorStatistics]) -> Any:
    """One histogram a tensor, counts on a logarithmic scale, with the clipping point as a red line.

    Per-channel weights are drawn relative to the amax of their channel, so their clipping point is 1.
    """
    rows = -(-len(statistics) // COLUMNS)
    figure = new_figure(3.4 * COLUMNS, 2.3 * max(rows, 1))
    axes = figure.subplots(max(rows, 1), COLUMNS, squeeze=False).ravel()
    for ax, tensor in zip(axes, statistics, strict=False):
        edges = [tensor.width * number for number in range(len(tensor.counts) + 1)]
        colour = COLOURS["PTQ"] if tensor.weight else COLOURS["QAT"]
        ax.stairs(tensor.counts, edges, fill=True, color=colour)
        ax.axvline(tensor.clip, color=RED, linewidth=1.2)
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.5)
        ax.set_xlim(0, 1.05 * max(edges[-1], tensor.clip))
        ax.tick_params(labelsize=7)
        ax.set_title(shortened(tensor.name), fontsize=7)
        unit = "|w| / amax of its channel" if tensor.channels > 1 else "|x|"
        ax.set_xlabel(f"{unit}; {tensor.sqnr_db:.1f} dB, {100 * tensor.clipped:.2g} % clipped", fontsize=7)
    for ax in axes[len(statistics) :]:
        ax.set_visible(False)
    return figure


def sensitivity_figure(scores: Sequence[tuple[str, float | None]], chosen: set[str], label: str) -> Any:
    """Bars of (layer or block, score), in the order given; those proposed to stay float are red.

    Args:
        scores: None where a score is not finite: no bar.
        chosen: names to mark.
        label: of the axis.
    """
    figure = new_figure(9, 1.2 + 0.2 * max(len(scores), 1))
    axes = figure.subplots()
    places = range(len(scores))
    colours = [RED if name in chosen else COLOURS["QAT"] for name, _ in scores]
    axes.barh(places, [score or 0.0 for _, score in scores], color=colours)
    axes.set_yticks(places, [shortened(name, 60) for name, _ in scores], fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_xlabel(f"{plain_text(label)}; red: proposed to stay float")
    return figure


def pareto_figure(
    points: Sequence[tuple[float, float, bool]],
    chosen: tuple[float, float],
    float_value: float,
    target: float,
    labels: tuple[str, str],
) -> Any:
    """Choices of float layers: (percent in INT8 or ms, metric, on the front), the front as a line.

    Args:
        points: every choice that was evaluated; those with nothing in INT8 are left out.
        chosen: the proposal.
        float_value: the metric with everything float.
        target: value that the proposal had to reach.
        labels: of the two axes.
    """
    figure = new_figure(8, 5)
    axes = figure.subplots()
    front = sorted((x, y) for x, y, best in points if best and x > 0)
    others = [(x, y) for x, y, best in points if not best and x > 0]
    axes.scatter([x for x, _ in others], [y for _, y in others], color=GREY, s=14, label="evaluated", alpha=0.7)
    axes.plot([x for x, _ in front], [y for _, y in front], marker="o", color=COLOURS["QAT"], label="Pareto front")
    axes.scatter([chosen[0]], [chosen[1]], color=RED, marker="*", s=160, zorder=3, label="proposal")
    axes.axhline(float_value, color=COLOURS["float"], linewidth=1, linestyle="--", label="everything float")
    axes.axhline(target, color=RED, linewidth=1, linestyle=":", label="target")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(plain_text(labels[1]))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def layer_figure(rows: Sequence[LayerSqnr]) -> Any:
    """SQNR by layer: of each alone, and with the noise of everything before it; the lowest are the ones to look at."""
    figure = new_figure(11, 4.5)
    axes = figure.subplots()
    places = range(len(rows))
    own = [float("nan") if row.own_db is None else row.own_db for row in rows]
    axes.plot(places, own, marker="o", markersize=3, color=COLOURS["QAT"], label="this layer alone quantized")
    axes.plot(places, [r.total_db for r in rows], marker="o", markersize=3, color=COLOURS["PTQ"], label="everything")
    axes.set_xticks(places, [shortened(row.name or "output", 28) for row in rows], rotation=90, fontsize=6)
    axes.set_ylabel("SQNR of the layer's output, dB")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
