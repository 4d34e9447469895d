"""Collecting a histogram on a GPU in five launches, none of which the host waits for.

Zeros, half of what comes out of a ReLU, are not counted but what is left: thousands of atomic additions to one bin
would wait for each other. The counts, maxima and batch numbers are those of `HistogramCalibrator`'s torch operations,
bit for bit. Imported at the first use on a GPU; TRITON_INTERPRET=1 runs the kernels on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.fake_quant_triton import is_dense
from qat.triton_launch import launch

BLOCK = 4096


@triton.jit(do_not_specialize=["batch"])  # type: ignore[untyped-decorator]
def _advance_kernel(  # type: ignore[no-untyped-def]
    low_ptr, high_ptr, max_ptr, bad_ptr, counts_ptr, exponent_ptr, factor_ptr, batch,
    log_bins: tl.constexpr, bins: tl.constexpr,
):  # fmt: skip
    """Fold one tensor's range into the running maximum, and merge bins where the histogram's range must grow."""
    low, high = tl.load(low_ptr).to(tl.float32), tl.load(high_ptr).to(tl.float32)
    largest = tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
    finite = largest < float("inf")
    tl.store(max_ptr, tl.maximum(tl.load(max_ptr), largest, propagate_nan=tl.PropagateNan.ALL))
    bad = tl.load(bad_ptr)
    tl.store(bad_ptr, tl.where((finite == 0) & (bad < 0), tl.zeros_like(bad) + batch, bad))
    bits = tl.where(finite, largest, 0.0).to(tl.int32, bitcast=True)
    before = tl.load(exponent_ptr)
    exponent = tl.maximum(((bits >> 23) - 126).to(tl.int64), before)
    if exponent > before:
        index = tl.arange(0, bins)
        counts = tl.load(counts_ptr + index)
        tl.debug_barrier()
        tl.store(counts_ptr + index, tl.zeros_like(counts))
        tl.debug_barrier()
        tl.atomic_add(counts_ptr + (index >> tl.minimum(exponent - before, 30).to(tl.int32)), counts)
        tl.store(exponent_ptr, exponent)
    tl.store(factor_ptr, ((log_bins - exponent + 127).to(tl.int32) << 23).to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _bins_kernel(  # type: ignore[no-untyped-def]
    x_ptr, factor_ptr, out_ptr, counts_ptr, size, big: tl.constexpr, bins: tl.constexpr, block: tl.constexpr
):
    """The bin of each |x|, int32; -1 for zero, NaN and infinity, and the latter two are taken off bin 0."""
    start = tl.program_id(0)
    if big:
        start = start.to(tl.int64)
    offsets = start * block + tl.arange(0, block)
    mask = offsets < size
    place = tl.abs(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)) * tl.load(factor_ptr)
    counted = place < bins
    places = tl.where(counted & (place != 0.0), tl.where(counted, place, 0.0).to(tl.int32), -1)
    tl.store(out_ptr + offsets, places, mask=mask)
    bad = tl.sum((mask & (counted == 0)).to(tl.int32), 0)
    if bad > 0:
        tl.atomic_add(counts_ptr, -bad.to(tl.int64))


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def _add_kernel(counts_ptr, found_ptr, size, bins: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add what was found among `size` values to the counts; the values not found go to bin 0."""
    index = tl.arange(0, bins)
    found = tl.load(found_ptr + index).to(tl.int64)
    rest = tl.where(index == 0, size - tl.sum(found, 0), 0)
    tl.store(counts_ptr + index, tl.load(counts_ptr + index) + found + rest)


def collect(x: Tensor, maximum: Tensor, bad_batch: Tensor, batch: int, counts: Tensor, exponent: Tensor) -> None:
    """Add one tensor that is not empty.

    Args:
        x: float tensor of any shape.
        maximum: float32, shape (); the running maximum of |x|.
        bad_batch: int64, shape (); number of the first batch with NaN or infinity, or -1.
        batch: this batch's number.
        counts: int64, shape (bins,).
        exponent: int64, shape (); the histogram's range is [0, 2**exponent).
    """
    x = x if is_dense(x) else x.contiguous()
    low, high = x.aminmax()
    factor = torch.empty((), dtype=torch.float32, device=x.device)
    bins = counts.numel()
    statistics = (low, high, maximum, bad_batch, counts, exponent, factor)
    launch(_advance_kernel, 1, statistics, (), (batch,), (bins.bit_length() - 1, bins), 8)
    places = torch.empty(x.numel(), dtype=torch.int32, device=x.device)
    big = x.numel() >= 2**31 - BLOCK
    programs = triton.cdiv(x.numel(), BLOCK)
    launch(_bins_kernel, programs, (x, factor, places, counts), (x.numel(),), (), (big, bins, BLOCK), 8)
    for piece in torch.split(places, 2**30):
        found = count_places(piece, bins)
        launch(_add_kernel, 1, (counts, found), (), (piece.numel(),), (bins,), 8)


def count_places(places: Tensor, bins: int) -> Tensor:
    """How often 0 ... bins - 1 occur; other numbers are left out. Integers make the GPU's atomics fast and exact."""
    return places.histc(bins=bins, min=0, max=bins)
