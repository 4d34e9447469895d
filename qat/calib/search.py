"""Choosing where to clip, given the histogram of |x|: each function returns a number of bins to keep.

amax is the right edge of the last bin kept. All three are the textbook searches over every candidate; prefix sums
at the level boundaries replace the inner loops, so a search costs candidates x levels instead of candidates x bins.

Prefix sums are made on the CPU, where they are the same in every run; the tables of candidates and levels, most of the
work, on the device asked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _prefix(values: Tensor) -> Tensor:
    """Sums of the first 0, 1, ... n values, float64."""
    return torch.cat([values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)])


def _x_log_x(values: Tensor) -> Tensor:
    product: Tensor = torch.special.xlogy(values, values)
    return product


def entropy_bin(counts: Tensor, levels: int, device: torch.device | None = None) -> int:
    """Bins to keep for the least KL divergence between the clipped and the quantized distribution.

    S. Migacz, "8-bit inference with TensorRT", GTC 2017. For each candidate i, P is the first i bins with the
    outliers added to the last one; Q merges the same bins (without the outliers) into `levels` levels, bin b into
    level floor(b * levels / i), and spreads each level evenly over its non-empty bins. Bin 0 takes the count of bin 1:
    zeros, which ReLU makes in any number, are exact at every scale and would drown the rest.

    Args:
        counts: int64, shape (bins,), on the CPU, ending with the last bin in use.
        levels: number of non-negative integer codes, 128 for 8 bits.
        device: where to search, None for the CPU.
    """
    bins = counts.numel()
    if bins <= levels:
        return bins
    counts = counts.double()
    counts[0] = counts[1]
    if counts.sum() == 0:
        return bins
    sums = [counts, _prefix(counts), _prefix(counts > 0), _prefix(_x_log_x(counts))]
    counts, mass, filled, self_term = (values.to(device) for values in sums)
    total = mass[-1]
    candidates = torch.arange(levels, bins + 1, device=device)
    starts = (torch.arange(levels + 1, device=device) * candidates[:, None] + levels - 1) // levels
    level_mass = mass[starts].diff()
    level_value = level_mass / filled[starts].diff().clamp_min(1)
    kept = mass[candidates]
    outliers = total - kept
    last = counts[candidates - 1]
    p_log_p = self_term[candidates - 1] + _x_log_x(last + outliers)
    p_log_q = torch.special.xlogy(level_mass, level_value).sum(1) + torch.special.xlogy(outliers, level_value[:, -1])
    divergence = (p_log_p - p_log_q) / total - total.log() + kept.log()
    impossible = (kept == 0) | ((last == 0) & (outliers > 0))
    return int(candidates[torch.where(impossible, math.inf, divergence).argmin()])


def mse_bin(counts: Tensor, max_bound: int, device: torch.device | None = None) -> int:
    """Bins to keep for the least mean squared quantization error, every value taken at the centre of its bin.

    For candidate i (in units of the bin width) the step is i / max_bound, and code k takes the bins whose centres lie
    between (k - 1/2) and (k + 1/2) steps, the largest code everything above. The boundaries are integers, so exact.

    Args:
        counts: int64, shape (bins,), on the CPU, ending with the last bin in use.
        max_bound: largest integer code, 127 for 8 bits.
        device: where to search, None for the CPU.
    """
    bins = counts.numel()
    candidates = torch.arange(1, bins + 1, device=device)
    codes = torch.arange(max_bound + 1, device=device)
    starts = -((-((2 * codes - 1) * candidates[:, None] - max_bound)) // (2 * max_bound))
    starts = torch.cat([starts.clamp(0, bins), torch.full((bins, 1), bins, device=device)], 1)
    centres = torch.arange(bins, dtype=torch.float64) + 0.5
    sums = [_prefix(counts), _prefix(counts * centres), _prefix(counts * centres**2)]
    mass, first, second = (values.to(device) for values in sums)
    points = codes * candidates[:, None].double() / max_bound
    error = second[starts].diff() - 2 * points * first[starts].diff() + points**2 * mass[starts].diff()
    return int(candidates[error.sum(1).argmin()])


def percentile_bin(counts: Tensor, percentile: float) -> int:
    """Fewest bins that hold at least `percentile` percent of all values, 0 < percentile <= 100."""
    needed = percentile / 100 * float(counts.sum())
    return int((counts.cumsum(0).double() < needed).sum()) + 1
