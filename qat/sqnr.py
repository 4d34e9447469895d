"""Signal-to-quantization-noise ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

RESOLUTION_DB = 144.5
"""Ratio at which float32 itself rounds (24 bits): what tensors that are equal are said to have, where a number is
needed."""


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two sums of squares; inf without noise, -inf without signal or with NaN."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


@dataclass
class Sqnr:
    """Sums of squares of a tensor and of what another one is away from it, batch by batch, on their device."""

    signal: Tensor | float = 0.0
    noise: Tensor | float = 0.0

    def add(self, reference: Tensor, other: Tensor) -> None:
        """Count one tensor; sums are float64."""
        a = reference.detach().double()
        self.signal = self.signal + a.square().sum()
        self.noise = self.noise + (other.detach().double() - a).square_().sum()

    @property
    def db(self) -> float:
        """Decibels, within +-RESOLUTION_DB so that the number can be written, compared and averaged."""
        return min(max(decibel(float(self.signal), float(self.noise)), -RESOLUTION_DB), RESOLUTION_DB)
