"""How much each layer or block costs: quantized alone, or left float alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tqdm import tqdm

from qat.errors import ConfigError
from qat.sensitivity.evaluations import Evaluations, Metrics, worth
from qat.sensitivity.units import Unit, find_blocks

Mode = Literal["leave_one_out", "quantize_one"]
Level = Literal["layer", "block"]


@dataclass(frozen=True)
class Sensitivity:
    """One layer or block.

    Attributes:
        name: its name; of layers that share a quantizer the first.
        units: what was switched.
        metrics: of the model with these units alone float ("leave_one_out") or alone quantized ("quantize_one").
        score: in the metric's unit; the gain from leaving them float, or the loss from quantizing them. None where it
            is not finite.
    """

    name: str
    units: tuple[Unit, ...]
    metrics: Metrics
    score: float | None

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the layers and operations."""
        return tuple(name for unit in self.units for name in unit.members)


@dataclass(frozen=True)
class Ranking:
    """Layers or blocks, the most sensitive first.

    Attributes:
        rows: one a layer or block.
        metric: what they are ranked by.
        lower_is_better: of the metric.
        mode: "leave_one_out" or "quantize_one".
        level: "layer" or "block".
        float_metrics: with everything float.
        int8_metrics: with everything quantized.
    """

    rows: tuple[Sensitivity, ...]
    metric: str
    lower_is_better: bool
    mode: Mode
    level: Level
    float_metrics: Metrics
    int8_metrics: Metrics

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "mode": self.mode,
            "level": self.level,
            "float": self.float_metrics,
            "int8": self.int8_metrics,
            "rows": [
                {"name": r.name, "members": list(r.members), "score": r.score, "metrics": r.metrics} for r in self.rows
            ],
        }


def rank_sensitivity(
    evaluations: Evaluations,
    metric: str,
    *,
    mode: Mode = "leave_one_out",
    level: Level = "layer",
    lower_is_better: bool = False,
    progress: bool = True,
) -> Ranking:
    """Evaluate the model once a layer or block, and sort by what each costs.

    "leave_one_out" quantizes all but one and measures what is gained; it sees how errors act together, and is what
    choosing layers to leave float needs. "quantize_one" quantizes one and measures what is lost; it tells more where
    the fully quantized model is so bad that no single layer helps.

    Args:
        evaluations: of the calibrated model.
        metric: name of a metric that they give.
        mode: what is measured.
        level: "layer", or "block" for a tenth of the evaluations on a deep model.
        lower_is_better: True for a loss or a divergence.
        progress: show a bar.

    Raises:
        ConfigError: unknown mode, level or metric.
    """
    if mode not in ("leave_one_out", "quantize_one"):
        raise ConfigError(f"mode={mode!r} is unknown. Use 'leave_one_out' or 'quantize_one'.")
    if level not in ("layer", "block"):
        raise ConfigError(f"level={level!r} is unknown. Use 'layer' or 'block'.")
    every = evaluations.units
    base = {True: evaluations.of(every), False: evaluations.of(())}
    targets = [(u.name, (u,)) for u in every] if level == "layer" else _blocks(evaluations)
    rows = []
    for name, units in tqdm(targets, f"sensitivity by {level}", disable=not progress, leave=False):
        alone = mode == "quantize_one"
        metrics = evaluations.of([u for u in every if u not in units] if alone else units)
        score = worth(metrics, metric, lower_is_better) - worth(base[alone], metric, lower_is_better)
        score = -score if alone else score
        rows.append(Sensitivity(name, tuple(units), metrics, score if math.isfinite(score) else None))

    def cost(row: Sensitivity) -> float:
        value = worth(row.metrics, metric, lower_is_better)
        return -value if mode == "quantize_one" else value

    rows.sort(key=cost, reverse=True)
    return Ranking(tuple(rows), metric, lower_is_better, mode, level, base[True], base[False])


def _blocks(evaluations: Evaluations) -> Sequence[tuple[str, tuple[Unit, ...]]]:
    return list(find_blocks(evaluations.model, evaluations.units).items())
