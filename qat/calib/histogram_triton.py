"""Collecting a histogram on a GPU in two or four launches, none of which the host waits for.

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

BLOCK, CHUNKS = 4096, 4
SMALL = 2**22
"""Elements up to which they are counted by additions in global memory; `histc` adds up 2 million counts in any case."""


@triton.jit(do_not_specialize=["batch"])  # type: ignore[untyped-decorator]
def _range_kernel(  # type: ignore[no-untyped-def]
    x_ptr, seen_ptr, max_ptr, bad_ptr, counts_ptr, exponent_ptr, size, batch,
    big: tl.constexpr, log_bins: tl.constexpr, bins: tl.constexpr, chunks: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The largest |x|, as bits, whose order is that of the numbers with NaN on top; the last program uses it.

    It folds it into the running maximum, and merges bins where the histogram's range must grow.
    """
    start = tl.program_id(0)
    if big:
        start = start.to(tl.int64)
    offsets = start * (block * chunks) + tl.arange(0, block)
    bits = tl.zeros((block,), tl.int32)
    for chunk in tl.static_range(chunks):
        place = offsets + chunk * block
        x = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(seen_ptr, tl.max(bits, 0))
    if tl.atomic_add(seen_ptr + 1, 1) == tl.num_programs(0) - 1:
        largest = tl.atomic_max(seen_ptr, 0)
        tl.store(seen_ptr + tl.arange(0, 2), tl.zeros((2,), tl.int32))
        _advance(largest, max_ptr, bad_ptr, counts_ptr, exponent_ptr, batch, bins)


@triton.jit  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    bits, max_ptr, bad_ptr, counts_ptr, exponent_ptr, batch, bins: tl.constexpr
):
    finite = bits < 0x7F800000
    largest = bits.to(tl.float32, bitcast=True)
    tl.store(max_ptr, tl.maximum(tl.load(max_ptr), largest, propagate_nan=tl.PropagateNan.ALL))
    bad = tl.load(bad_ptr)
    tl.store(bad_ptr, tl.where((finite == 0) & (bad < 0), tl.zeros_like(bad) + batch, bad))
    before = tl.load(exponent_ptr)
    exponent = tl.maximum((tl.where(finite, bits >> 23, 0) - 126).to(tl.int64), before)
    if exponent > before:
        index = tl.arange(0, bins)
        counts = tl.load(counts_ptr + index)
        tl.debug_barrier()
        tl.store(counts_ptr + index, tl.zeros_like(counts))
        tl.debug_barrier()
        tl.atomic_add(counts_ptr + (index >> tl.minimum(exponent - before, 30).to(tl.int32)), counts)
        tl.store(exponent_ptr, exponent)


@triton.jit  # type: ignore[untyped-decorator]
def _bins_kernel(  # type: ignore[no-untyped-def]
    x_ptr, exponent_ptr, out_ptr, counts_ptr, size,
    big: tl.constexpr, log_bins: tl.constexpr, bins: tl.constexpr, direct: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The bin of each |x|, int32; -1 for zero, NaN and infinity, and the latter two are taken off bin 0.

    With `direct` the bins are counted at once, the zeros of a block in one addition.
    """
    start = tl.program_id(0)
    if big:
        start = start.to(tl.int64)
    offsets = start * block + tl.arange(0, block)
    mask = offsets < size
    factor = ((log_bins + 127 - tl.load(exponent_ptr)).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    place = tl.abs(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)) * factor
    counted = place < bins
    rest = place != 0.0
    index = tl.where(counted, place, 0.0).to(tl.int32)
    if direct:
        tl.atomic_add(counts_ptr + index, tl.full((block,), 1, tl.int64), mask=mask & counted & rest)
        zeros = tl.sum((mask & (rest == 0)).to(tl.int32), 0)
        if zeros > 0:
            tl.atomic_add(counts_ptr, zeros.to(tl.int64))
    else:
        tl.store(out_ptr + offsets, tl.where(counted & rest, index, -1), mask=mask)
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


def collect(
    x: Tensor, maximum: Tensor, bad_batch: Tensor, batch: int, counts: Tensor, exponent: Tensor, seen: Tensor
) -> None:
    """Add one tensor that is not empty.

    Args:
        x: float tensor of any shape.
        maximum: float32, shape (); the running maximum of |x|.
        bad_batch: int64, shape (); number of the first batch with NaN or infinity, or -1.
        batch: this batch's number.
        counts: int64, shape (bins,).
        exponent: int64, shape (); the histogram's range is [0, 2**exponent).
        seen: int32, shape (2,), zeros; zeros again afterwards.
    """
    x = x if is_dense(x) else x.contiguous()
    size, bins = x.numel(), counts.numel()
    constants = (size >= 2**31 - BLOCK * CHUNKS, bins.bit_length() - 1, bins)
    statistics = (x, seen, maximum, bad_batch, counts, exponent)
    launch(_range_kernel, -(-size // (BLOCK * CHUNKS)), statistics, (size,), (batch,), (*constants, CHUNKS, BLOCK), 8)
    direct = size <= SMALL
    places = None if direct else torch.empty(size, dtype=torch.int32, device=x.device)
    pointers = (x, exponent, places, counts)
    launch(_bins_kernel, -(-size // BLOCK), pointers, (size,), (), (*constants, direct, BLOCK), 8)
    if places is None:
        return
    for piece in torch.split(places, 2**30) if size > 2**30 else (places,):
        found = count_places(piece, bins)
        launch(_add_kernel, 1, (counts, found), (), (piece.numel(),), (bins,), 8)


def count_places(places: Tensor, bins: int) -> Tensor:
    """How often 0 ... bins - 1 occur; other numbers are left out. Integers make the GPU's atomics fast and exact."""
    return places.histc(bins=bins, min=0, max=bins)
