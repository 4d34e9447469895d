"""What a TensorQuantizer does, and how its amax changes."""

from __future__ import annotations

import enum


class QuantizerState(enum.Enum):
    """What a quantizer does with the tensors it is given; stored in the state dict by number."""

    PASSTHROUGH = 0
    CALIBRATING = 1
    QUANTIZING = 2


class AmaxMode(enum.Enum):
    """How amax changes while a model trains."""

    FROZEN = "frozen"
    REESTIMATED = "reestimated"
    LEARNED = "learned"
