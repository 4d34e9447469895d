"""MaxCalibrator: amax is the largest absolute value seen, per tensor or per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qat.calib.base import register_calibrator
from qat.distributed import all_reduce_max
from qat.errors import CalibrationError


class MaxCalibrator:
    """Keeps the running maximum of |x| on the tensor's device, without waiting for it.

    Args:
        axis: channel dimension, or None for one maximum per tensor.
    """

    methods: tuple[str, ...] = ("max",)

    def __init__(self, num_bits: int = 8, axis: int | None = None, narrow_range: bool = False) -> None:
        del num_bits, narrow_range
        self.axis = axis
        self.reset()

    def reset(self) -> None:
        """Forget everything collected."""
        self._max: Tensor | None = None
        self._bad_batch: Tensor | None = None
        self._batches = 0
        self._parameter: tuple[nn.Parameter, int] | None = None

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Add one tensor of any shape; empty tensors count as a batch and change nothing, nor does a known weight."""
        if x.numel() and not self._known(x):
            self.update(x)
        self._batches += 1

    def _known(self, x: Tensor) -> bool:
        """True for the parameter of the batch before, unchanged since."""
        if not isinstance(x, nn.Parameter):
            return False
        known = self._parameter is not None and self._parameter[0] is x and self._parameter[1] == x._version
        self._parameter = (x, x._version)
        return known

    def update(self, x: Tensor) -> Tensor:
        """Fold x into the running maximum; return this tensor's own maximum, float32, NaN or Inf kept."""
        if self.axis is None:
            low, high = x.aminmax()
        else:
            dims = [d for d in range(x.dim()) if d != self.axis % x.dim()]
            low, high = x.amin(dims), x.amax(dims)
        batch_max = torch.maximum(-low, high).float()
        bad = ~torch.isfinite(batch_max).all()
        maximum, bad_batch = self.statistics(batch_max)
        self._max = torch.maximum(maximum, batch_max)
        self._bad_batch = torch.where(bad & (bad_batch < 0), self._batches, bad_batch)
        return batch_max

    def statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The running maximum, shaped as `like`, and the number of the first bad batch; made where there are none."""
        if self._max is None or self._bad_batch is None:
            self._max = torch.zeros_like(like, dtype=torch.float32)
            self._bad_batch = torch.full((), -1, dtype=torch.int64, device=like.device)
        return self._max, self._bad_batch

    def compute_amax(self, method: str | None = None, **options: Any) -> Tensor | None:
        """Running maximum of all ranks, shape () or (C,), float32; None where no tensor was collected.

        Raises:
            CalibrationError: another method than "max" was asked for, or a batch held NaN or Inf.
        """
        if method not in (None, "max") or options:
            raise CalibrationError(
                f"method {method!r} with {options or 'no options'} needs a histogram and this quantizer collects "
                "only maxima. Use QuantDescriptor(calib_method='histogram')."
            )
        value, bad_batch = all_reduce_max(self._max, self._bad_batch)
        if bad_batch is not None and int(bad_batch) >= 0:
            raise CalibrationError(
                f"batch {int(bad_batch)} (counted from 0) holds NaN or Inf. Check that batch's data and the layers "
                "before this one."
            )
        return value


register_calibrator("max", MaxCalibrator)
