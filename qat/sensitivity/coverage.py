"""How much of the arithmetic runs in INT8, and which choices of float layers are worth taking."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qat.calibration import Forward, run_batch, to_device
from qat.modes import evaluation_mode
from qat.placement.attention import QuantAttention
from qat.sensitivity.evaluations import Evaluations, worth
from qat.sensitivity.units import Unit


@dataclass(frozen=True)
class Point:
    """One choice of float units.

    Attributes:
        units: what was float.
        coverage: percent of the model's multiply-accumulates in INT8.
        value: the metric.
        best: no other choice has both a coverage and a value at least as good, and one of them better.
    """

    units: tuple[Unit, ...]
    coverage: float
    value: float
    best: bool = False


@torch.no_grad()
def operation_shares(
    model: nn.Module, units: Sequence[Unit], batch: Any, forward: Forward = run_batch
) -> dict[Unit, float]:
    """Percent of the model's multiply-accumulates in each unit, counted in one forward pass of a calibrated model.

    Products that a module computes by functions (an attention's) are divided evenly among the units that it has; adds,
    concats and pooling count nothing. A `QuantMultiheadAttention` counts as a whole.
    """
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    counter: Any = FlopCounterMode(display=False)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its one operator is unknown to the counter
    try:
        with evaluation_mode(model), counter:
            forward(model, to_device(batch, device))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    root = f"{type(model).__name__}."
    counts = {name.removeprefix(root): sum(c.values()) for name, c in counter.get_flop_counts().items()}
    total = counter.get_total_flops()
    modules = dict(model.named_modules())
    functional: dict[str, list[Unit]] = defaultdict(list)
    shares = dict.fromkeys(units, 0.0)
    for unit in units:
        for member in unit.members:
            if member in modules:
                shares[unit] += counts.get(member, 0)
            elif not member.rpartition(".")[2].startswith(("add", "concat", "avg_pool", "mul")):
                functional[member.rpartition(".")[0]].append(unit)
    for layer, sharers in functional.items():
        children = [n for n, child in modules[layer].named_children() if not isinstance(child, QuantAttention)]
        name = layer or "Global"
        own = counts.get(name, 0) - sum(counts.get(f"{layer}.{child}".lstrip("."), 0) for child in children)
        for unit in sharers:
            shares[unit] += own / len(sharers)
    return {unit: 100 * count / max(total, 1) for unit, count in shares.items()}


def pareto(
    evaluations: Evaluations, shares: Mapping[Unit, float], metric: str, lower_is_better: bool = False
) -> list[Point]:
    """Every evaluation so far with a finite metric, by falling coverage; those on the Pareto front are marked."""
    whole = sum(shares[unit] for unit in evaluations.units)
    points = []
    for units, metrics in evaluations.known():
        value = metrics.get(metric)
        if value is not None:
            points.append(Point(units, whole - sum(shares[unit] for unit in units), value))
    return mark_front(points, lower_is_better)


def mark_front(points: Iterable[Point], lower_is_better: bool = False) -> list[Point]:
    """The points by falling coverage, with `best` set on the Pareto front."""
    ordered = sorted(
        points,
        key=lambda p: (p.coverage, worth({"value": p.value}, "value", lower_is_better), -len(p.units)),
        reverse=True,
    )
    front, marked = -math.inf, []
    for point in ordered:
        gain = worth({"value": point.value}, "value", lower_is_better)
        marked.append(Point(point.units, point.coverage, point.value, gain > front))
        front = max(front, gain)
    return marked
