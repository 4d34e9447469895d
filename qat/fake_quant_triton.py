"""GPU kernels of the fake-quantize operator: one read and one write forward, two reads and one write backward.

They give the bits of the torch implementation in `qat.fake_quant`, which stays the reference and the fallback. Imported
at the first use on a GPU. TRITON_INTERPRET=1 runs them on a CPU, which is how they are tested without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.descriptor import MIN_SCALE

BLOCK = 4096
ROUND: Any = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a float32 below 2**22 half to even."""
FLOOR: Any = tl.constexpr(MIN_SCALE)


@triton.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    x_ptr,
    amax_ptr,
    size,
    channels,
    stride,
    big: tl.constexpr,
    per_channel: tl.constexpr,
    max_bound: tl.constexpr,
    block: tl.constexpr,
):
    """Offsets, mask, x / scale and scale of this program's elements."""
    start = tl.program_id(0)
    if big:
        start = start.to(tl.int64)
    offsets = start * block + tl.arange(0, block)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if per_channel:
        amax = tl.load(amax_ptr + (offsets // stride) % channels, mask=mask, other=1.0)
    else:
        amax = tl.load(amax_ptr + tl.zeros_like(offsets))
    bound = tl.zeros_like(amax) + max_bound
    scale = tl.maximum(tl.div_rn(amax, bound), FLOOR)
    return offsets, mask, tl.div_rn(x, scale), scale


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    amax_ptr,
    y_ptr,
    size,
    channels,
    stride,
    min_bound: tl.constexpr,
    max_bound: tl.constexpr,
    per_channel: tl.constexpr,
    big: tl.constexpr,
    block: tl.constexpr,
):
    offsets, mask, ratio, scale = _load(x_ptr, amax_ptr, size, channels, stride, big, per_channel, max_bound, block)
    # The bounds are integers, so clamping first gives the same code. min and max would swallow a NaN.
    codes = tl.minimum(tl.maximum(ratio, min_bound), max_bound)
    codes = (codes + ROUND) - ROUND
    y = tl.where(ratio == ratio, codes * scale, ratio)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    x_ptr,
    amax_ptr,
    out_ptr,
    size,
    channels,
    stride,
    min_bound: tl.constexpr,
    max_bound: tl.constexpr,
    per_channel: tl.constexpr,
    big: tl.constexpr,
    block: tl.constexpr,
):
    offsets, mask, ratio, _ = _load(x_ptr, amax_ptr, size, channels, stride, big, per_channel, max_bound, block)
    near = tl.minimum(tl.maximum(ratio, min_bound - 2), max_bound + 2)
    codes = (near + ROUND) - ROUND
    inside = (codes >= min_bound) & (codes <= max_bound) & (ratio == ratio)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, tl.where(inside, grad, tl.zeros_like(grad)), mask=mask)


def is_dense(x: Tensor) -> bool:
    """True where the elements fill a block of memory without gaps, in one of the memory formats that layers use."""
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def forward(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """Fake-quantize a dense x; the result has its memory format."""
    y = torch.empty_like(x)
    _launch(_forward_kernel, (x, amax, y), x, amax, axis, min_bound, max_bound)
    return y


def backward(grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """The gradient where the code lies within the bounds, else zero; x dense, the result has its memory format."""
    if grad.stride() != x.stride():
        grad = torch.empty_like(x, dtype=grad.dtype).copy_(grad)
    out = torch.empty_like(grad)
    _launch(_backward_kernel, (grad, x, amax, out), x, amax, axis, min_bound, max_bound)
    return out


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int
) -> None:
    size = x.numel()
    if size == 0:
        return
    stride = 1 if axis is None else x.stride(axis)
    kernel[(triton.cdiv(size, BLOCK),)](
        *tensors,
        size,
        amax.numel(),
        stride,
        min_bound=min_bound,
        max_bound=max_bound,
        per_channel=axis is not None,
        big=size >= 2**31 - BLOCK,
        block=BLOCK,
        num_warps=8,
    )
