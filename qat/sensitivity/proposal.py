"""The smallest set of layers to leave float for a target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from qat.sensitivity.evaluations import Evaluations, Metrics, worth
from qat.sensitivity.ranking import Ranking
from qat.sensitivity.units import Unit


@dataclass(frozen=True)
class Step:
    """One evaluated choice: what was added to (or, with a minus sign, taken from) the float layers, and the result."""

    change: str
    units: tuple[Unit, ...]
    metrics: Metrics


@dataclass(frozen=True)
class Proposal:
    """Which units to leave float.

    Attributes:
        units: these; empty where the quantized model reaches the target as it is.
        metrics: measured with them float.
        metric: what the target is about.
        target: value that had to be reached.
        reached: whether it was.
        steps: every choice evaluated on the way, in order, the fully quantized model first.
    """

    units: tuple[Unit, ...]
    metrics: Metrics
    metric: str
    target: float
    reached: bool
    steps: tuple[Step, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the layers and operations to leave float; `qat.selectors.exact` makes an `exclude` of each."""
        return members(self.units)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "float": list(self.members),
            "metrics": self.metrics,
            "metric": self.metric,
            "target": self.target,
            "reached": self.reached,
            "steps": [{"change": s.change, "float": list(members(s.units)), "metrics": s.metrics} for s in self.steps],
        }


def members(units: Iterable[Unit]) -> tuple[str, ...]:
    """Names of the layers and operations of these units."""
    return tuple(name for unit in units for name in unit.members)


def propose(
    evaluations: Evaluations,
    ranking: Ranking,
    metric: str,
    target: float,
    *,
    lower_is_better: bool = False,
    whole: bool = False,
    progress: bool = True,
) -> Proposal:
    """Leave the most sensitive layers float, one more at a time, until the target is reached; then take back.

    Greedy: each step adds the next row of the ranking and is evaluated. Once the target is reached, every unit chosen
    is tried quantized again, the least sensitive first, and stays so where the target still holds; so no unit of the
    proposal can be dropped by itself. A smaller set that another order would have found is not excluded. Choosing by
    the metric on validation data favours what happens to suit these data.

    Args:
        evaluations: of the calibrated model, by the metric of the target; those of the ranking may be others.
        ranking: order to follow.
        metric: what the target is about.
        target: least (or, with `lower_is_better`, largest) value to reach.
        whole: go on to the end of the ranking, for the whole curve of accuracy against coverage.

    Returns:
        The proposal; not `reached` where even all of them float miss the target.

    Raises:
        ConfigError: unknown metric.
    """

    def good(found: Metrics) -> bool:
        return worth(found, metric, lower_is_better) >= (-target if lower_is_better else target)

    chosen: list[Unit] = []
    metrics = evaluations.of(())
    steps = [Step("", (), metrics)]
    best: list[Unit] | None = [] if good(metrics) else None
    for row in tqdm(ranking.rows, "leave float", disable=not progress, leave=False):
        if best is not None and not whole:
            break
        chosen = chosen + [unit for unit in row.units if unit not in chosen]
        metrics = evaluations.of(chosen)
        steps.append(Step(f"+{row.name}", tuple(chosen), metrics))
        if best is None and good(metrics):
            best = chosen
    reached, kept = best is not None, list(chosen if best is None else best)
    for unit in tqdm(list(reversed(kept)) if reached else [], "quantize again", disable=not progress, leave=False):
        fewer = [other for other in kept if other is not unit]
        metrics = evaluations.of(fewer)
        steps.append(Step(f"-{unit.name}", tuple(fewer), metrics))
        if good(metrics):
            kept = fewer
    return Proposal(tuple(kept), evaluations.of(kept), metric, target, reached, tuple(steps))
