"""An expression in a loop whose runs read different tensors in INT8."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from torch import Tensor, nn


class QuantRuns(nn.ModuleDict):
    """Quantizers of one expression by the number of its run, "0" for the first in a forward.

    In HRNet's `y = y + f(x)` the identity is the left operand in some runs and the right one in others.
    A run without a quantizer passes its tensor through.
    """

    def begin(self) -> Callable[[Tensor], Tensor]:
        """What to call in each run of one forward, in order."""
        runs = count()

        def quantize(x: Tensor) -> Tensor:
            key = str(next(runs))
            return self[key](x) if key in self else x

        return quantize
