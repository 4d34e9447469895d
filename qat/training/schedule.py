"""Annealed learning-rate schedules: a factor for each optimizer step, computed from the step number alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qat.errors import ConfigError

ScheduleName = Literal["cosine", "step"]


@dataclass(frozen=True)
class Schedule:
    """Factor on the base learning rate for every optimizer step: a linear warm-up, then cosine or step decay.

    Nothing is carried from one step to the next, so a resumed run needs only its step number. Cosine is SGDR
    without restarts (Loshchilov and Hutter 2017).

    Attributes:
        total_steps: optimizer steps of the whole run.
        kind: "cosine" falls to `final_factor`; "step" multiplies by `gamma` every `decay_steps`.
        warmup_steps: steps over which the factor grows from 1 / warmup_steps to 1.
        final_factor: what cosine ends at, a share of the base learning rate.
        decay_steps: for "step", optimizer steps between two decays, counted from the end of the warm-up.
        gamma: for "step", what one decay multiplies by.

    Raises:
        ConfigError: a value outside its range; the message names it.
    """

    total_steps: int
    kind: ScheduleName = "cosine"
    warmup_steps: int = 0
    final_factor: float = 0.0
    decay_steps: int = 1
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "step"):
            raise ConfigError(f"schedule={self.kind!r} is unknown. Use 'cosine' or 'step'.")
        if self.total_steps < 1 or self.decay_steps < 1:
            raise ConfigError(
                f"total_steps={self.total_steps} and decay_steps={self.decay_steps} must be at least 1. "
                "Train at least one epoch on at least one batch."
            )
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is outside 0..{self.total_steps}, the steps of the run. "
                "Shorten the warm-up or train longer."
            )

    def factor(self, step: int) -> float:
        """Factor for optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = step - self.warmup_steps
        if self.kind == "step":
            return float(self.gamma ** (done // self.decay_steps))
        share = min(done / max(self.total_steps - self.warmup_steps, 1), 1.0)
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * share))


def qat_epochs(float_epochs: int, share: float = 0.1) -> int:
    """Epochs of quantization-aware fine-tuning: a share of the float schedule, rounded, at least 1.

    Raises:
        ConfigError: float_epochs below 1, or share outside (0, 1].
    """
    if float_epochs < 1:
        raise ConfigError(f"float_epochs={float_epochs} is below 1. Give the epochs of the original schedule.")
    if not 0 < share <= 1:
        raise ConfigError(f"share={share} is outside (0, 1]. Use 0.1 for a tenth of the original schedule.")
    return max(1, math.floor(float_epochs * share + 0.5))
