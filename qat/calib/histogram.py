"""HistogramCalibrator: a histogram of |x| from which amax is chosen by entropy, MSE, percentile or maximum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.calib.base import register_calibrator
from qat.calib.max import MaxCalibrator
from qat.calib.search import entropy_bin, mse_bin, percentile_bin
from qat.distributed import gather
from qat.errors import CalibrationError, DescriptorError

MIN_EXPONENT = -100
"""Smallest histogram range, 2**-100: values below fall in the first bins."""
EXACT_FLOAT_COUNT = 2**24
"""torch.histc counts in float32, which is exact up to here: larger tensors are counted in pieces."""


class HistogramCalibrator:
    """Counts |x| in bins on the tensor's device, without waiting for it.

    The histogram covers [0, 2**exponent), with the smallest exponent that holds every value seen, so a range that
    grows only merges bins: memory is fixed, int64 counts are exact, and the histogram (hence amax) does not depend on
    the order of the batches or on how they are spread over ranks.

    Args:
        num_bits: width of the integer the amax is chosen for.
        axis: must be None; a histogram per channel is not offered.
        num_bins: power of two; between num_bins / 2 and num_bins of them lie below the maximum.
    """

    methods: tuple[str, ...] = ("max", "entropy", "mse", "percentile")

    def __init__(
        self, num_bits: int = 8, axis: int | None = None, narrow_range: bool = False, num_bins: int = 4096
    ) -> None:
        del narrow_range
        if axis is not None:
            raise DescriptorError(f"axis={axis}: a histogram is kept per tensor only. Use calib_method='max'.")
        if num_bins < 2**num_bits or num_bins & (num_bins - 1):
            raise DescriptorError(f"num_bins={num_bins} must be a power of two of at least {2**num_bits}.")
        self.num_bins = num_bins
        self.levels = int(2 ** (num_bits - 1))
        self.reset()

    def reset(self) -> None:
        """Forget everything collected."""
        self._max = MaxCalibrator()
        self._counts: Tensor | None = None
        self._exponent: Tensor | None = None
        self._seen: Tensor | None = None

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Add one floating-point tensor of any shape; empty tensors change nothing."""
        if x.numel():
            kernels = _gpu_kernels(x)
            if kernels is None:
                self._count(x, self._max.update(x))
            else:
                counts, exponent, seen = self._statistics(x.device)
                maximum, bad_batch = self._max.statistics(exponent)
                kernels.collect(x, maximum, bad_batch, self._max._batches, counts, exponent, seen)
        self._max._batches += 1

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, exponent of the range, and what the GPU's kernels tell each other; made where there are none."""
        if self._counts is None or self._exponent is None or self._seen is None:
            self._counts = torch.zeros(self.num_bins, dtype=torch.int64, device=device)
            self._exponent = torch.full((), MIN_EXPONENT, dtype=torch.int64, device=device)
            self._seen = torch.zeros(2, dtype=torch.int32, device=device)
        return self._counts, self._exponent, self._seen

    def _count(self, x: Tensor, batch_max: Tensor) -> None:
        counts, before, _ = self._statistics(x.device)
        usable = torch.where(torch.isfinite(batch_max), batch_max, 0.0)
        # frexp gives zero the exponent 0, and a batch of zeros must not widen the range.
        exponent = torch.maximum(torch.where(usable > 0, torch.frexp(usable).exponent.long(), before), before)
        self._counts = _merge_bins(counts, exponent - before)
        self._exponent = exponent
        factor = _power_of_two(self.num_bins.bit_length() - 1 - exponent)
        for piece in torch.split(x.flatten(), EXACT_FLOAT_COUNT):
            position = piece.float().abs() * factor
            counted = torch.histc(position, bins=self.num_bins, min=0, max=self.num_bins)
            self._counts += counted.long()

    def compute_amax(self, method: str | None = None, **options: Any) -> Tensor | None:
        """Amax by `method`, over the batches of all ranks; the statistics stay for another method.

        The search runs in float64 where the counts are, on sums made on the CPU.

        Args:
            method: "entropy" (least KL divergence, Migacz 2017; the default), "mse" (least mean squared error),
                "percentile" (option `percentile`, default 99.99) or "max".

        Returns:
            Scalar float32 tensor, or None where no tensor was collected.

        Raises:
            CalibrationError: unknown method or option, or a batch held NaN or Inf.
        """
        method = method or "entropy"
        if method not in self.methods:
            raise CalibrationError(f"method {method!r} is unknown. Known: {', '.join(self.methods)}.")
        percentile = options.pop("percentile", 99.99)
        if options or not 0 < percentile <= 100:
            raise CalibrationError(f"options {options}, percentile={percentile}: only 0 < percentile <= 100 is known.")
        maximum = self._max.compute_amax()
        merged = self.histogram()
        if maximum is None or merged is None:
            return None
        if method == "max":
            return maximum
        counts, width = merged
        used = min(int(float(maximum) / width) + 1, self.num_bins)
        counts = counts[:used]
        device = None if self._counts is None else self._counts.device
        if method == "entropy":
            edge = entropy_bin(counts, self.levels, device)
        elif method == "mse":
            edge = mse_bin(counts, self.levels - 1, device)
        else:
            edge = percentile_bin(counts, percentile)
        return maximum.clamp_max(min(edge * width, float(maximum)))  # the last edge may exceed float32

    def histogram(self) -> tuple[Tensor, float] | None:
        """Counts of |x| over all ranks (CPU, int64, shape (num_bins,)) and a bin's width; None before any tensor."""
        own = None
        if self._counts is not None and self._exponent is not None:
            own = (self._counts.cpu(), int(self._exponent))
        parts = [part for part in gather(own) if isinstance(part, tuple)]
        if not parts:
            return None
        exponent = max(part[1] for part in parts)
        total = torch.zeros(self.num_bins, dtype=torch.int64)
        for counts, own_exponent in parts:
            total += _merge_bins(counts, torch.tensor(exponent - own_exponent))
        return total, 2.0 ** (exponent - self.num_bins.bit_length() + 1)


def _gpu_kernels(x: Tensor) -> Any:
    """The Triton kernels where they can take x, else None."""
    if not x.is_cuda:
        return None
    try:
        from qat.calib import histogram_triton
    except ImportError:
        return None
    return histogram_triton


def _merge_bins(counts: Tensor, doublings: Tensor) -> Tensor:
    """Counts over a range `2**doublings` times larger, same number of bins."""
    index = torch.arange(counts.numel(), device=counts.device) >> doublings.clamp_max(62)
    return torch.zeros_like(counts).scatter_add_(0, index, counts)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as float32, exactly, by writing the exponent bits; -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


register_calibrator("histogram", HistogramCalibrator)
