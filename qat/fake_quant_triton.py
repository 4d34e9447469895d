"""GPU kernels of the fake-quantize operator, for tensors that fill their memory without gaps, in any memory format.

Forward: one read, one write, and one bit an element that says whether the code lies within the bounds. Backward: reads
the gradient and the bits. With a learned amax the backward reads x instead, and sums amax's gradient in the same pass.

They give the bits of the torch implementation in `qat.fake_quant`, which stays the reference and the fallback. Imported
at the first use on a GPU. TRITON_INTERPRET=1 runs them on a CPU, which is how they are tested without a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.descriptor import MIN_SCALE

ROWS = 512
"""Bytes of eight bits that one program handles: 4096 elements, so that a thread reads and writes 16 bytes at once."""
WARPS = 8
ROUND: Any = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a float32 below 2**22 half to even."""
FLOOR: Any = tl.constexpr(MIN_SCALE)
LARGEST: Any = tl.constexpr(3.4028234663852886e38)
NAN: Any = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(amax, max_bound: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale, as `qat.fake_quant.compute_scale` has it."""
    bound = tl.zeros_like(amax) + max_bound
    return tl.maximum(tl.div_rn(amax, bound), FLOOR)


@triton.jit  # type: ignore[untyped-decorator]
def divide(x, scale, inverse, min_bound: tl.constexpr, max_bound: tl.constexpr):  # type: ignore[no-untyped-def]
    """x / scale, correctly rounded where it is within two of the bounds, else somewhere beyond them; NaN stays.

    Two corrections of x * inverse by its exact remainder, as in an IEEE division, but with one reciprocal a tensor
    (P. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
    """
    low = tl.maximum((min_bound - 2) * scale, -LARGEST)
    high = tl.minimum((max_bound + 2) * scale, LARGEST)
    x = tl.minimum(tl.maximum(x, low, propagate_nan=NAN), high, propagate_nan=NAN)
    ratio = x * inverse
    ratio = tl.fma(tl.fma(-ratio, scale, x), inverse, ratio)
    return tl.fma(tl.fma(-ratio, scale, x), inverse, ratio)


@triton.jit  # type: ignore[untyped-decorator]
def code_of(ratio, min_bound: tl.constexpr, max_bound: tl.constexpr):  # type: ignore[no-untyped-def]
    """The code rounded half to even, exact up to two beyond the bounds; NaN stays."""
    near = tl.maximum(ratio, min_bound - 2, propagate_nan=NAN)
    near = tl.minimum(near, max_bound + 2, propagate_nan=NAN)
    return (near + ROUND) - ROUND


@triton.jit  # type: ignore[untyped-decorator]
def value_of(code, scale, min_bound: tl.constexpr, max_bound: tl.constexpr):  # type: ignore[no-untyped-def]
    """The clamped code times the scale; NaN stays."""
    code = tl.maximum(code, min_bound, propagate_nan=NAN)
    return tl.minimum(code, max_bound, propagate_nan=NAN) * scale


@triton.jit  # type: ignore[untyped-decorator]
def _elements(size, big: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Byte offsets (rows,) and element offsets (rows, 8) of this program."""
    start = tl.program_id(0)
    if big:
        start = start.to(tl.int64)
    groups = start * rows + tl.arange(0, rows)
    return groups, groups[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _ratio(  # type: ignore[no-untyped-def]
    x, amax_ptr, offsets, channels, stride, min_bound: tl.constexpr, max_bound: tl.constexpr, per_channel: tl.constexpr
):
    """x / scale and scale; one return, since the compiler wants the same types from each."""
    if per_channel:
        scale = scale_of(tl.load(amax_ptr + (offsets // stride) % channels), max_bound)
        ratio = tl.div_rn(x, scale)
    else:
        scale = scale_of(tl.load(amax_ptr), max_bound)
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
        ratio = divide(x, scale, inverse, min_bound, max_bound)
    return ratio, scale


@triton.jit
def _pack(bits):  # type: ignore[no-untyped-def]
    """Eight bits (rows, 8) to bytes (rows,)."""
    return tl.sum(bits.to(tl.int32) << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amax_ptr, y_ptr, inside_ptr, positive_ptr, size, channels, stride,
    min_bound: tl.constexpr, max_bound: tl.constexpr, per_channel: tl.constexpr,
    keep_inside: tl.constexpr, keep_positive: tl.constexpr, big: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    groups, offsets = _elements(size, big, rows)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    ratio, scale = _ratio(x, amax_ptr, offsets, channels, stride, min_bound, max_bound, per_channel)
    code = code_of(ratio, min_bound, max_bound)
    y = value_of(code, scale, min_bound, max_bound)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    if keep_inside:
        tl.store(inside_ptr + groups, _pack((code >= min_bound) & (code <= max_bound)), mask=groups * 8 < size)
    if keep_positive:  # a NaN is not below zero: ReLU's backward lets its gradient pass
        tl.store(positive_ptr + groups, _pack((x <= 0.0) == 0), mask=groups * 8 < size)


@triton.jit  # type: ignore[untyped-decorator]
def _select_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, bits_ptr, out_ptr, size, ones: tl.constexpr, big: tl.constexpr, rows: tl.constexpr
):
    """The gradient (or one) where the bit is set, else zero."""
    groups, offsets = _elements(size, big, rows)
    mask = offsets < size
    bits = tl.load(bits_ptr + groups, mask=groups * 8 < size, other=0).to(tl.int32)
    bits = (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1
    if ones:
        tl.store(out_ptr + offsets, bits.to(tl.float32).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
        tl.store(out_ptr + offsets, tl.where(bits != 0, grad, tl.zeros_like(grad)), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, amax_ptr, out_ptr, sums_ptr, size, channels, stride,
    min_bound: tl.constexpr, max_bound: tl.constexpr, per_channel: tl.constexpr, learned: tl.constexpr,
    big: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """The gradient from x; with `learned`, this program's part of the gradient to the scale too."""
    _, offsets = _elements(size, big, rows)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
    ratio, _ = _ratio(x, amax_ptr, offsets, channels, stride, min_bound, max_bound, per_channel)
    code = code_of(ratio, min_bound, max_bound)
    inside = (code >= min_bound) & (code <= max_bound)
    tl.store(out_ptr + offsets, tl.where(inside, grad, tl.zeros_like(grad)), mask=mask)
    if learned:
        slope = tl.where(inside, code - ratio, value_of(code, 1.0, min_bound, max_bound))
        tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.sum(grad.to(tl.float32) * slope, 1), 0))


def is_dense(x: Tensor) -> bool:
    """True where the elements fill a block of memory without gaps, in one of the memory formats that layers use."""
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def forward(
    x: Tensor,
    amax: Tensor,
    axis: int | None,
    min_bound: int,
    max_bound: int,
    keep_inside: bool = False,
    keep_positive: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Fake-quantize a dense x.

    Returns:
        The result, with x's memory format; where asked for, the bits of "the code is within the bounds" and of "x is
        not below or at zero", uint8, one byte for eight elements in the order of x's memory.
    """
    y = torch.empty_like(x)
    inside = _new_bits(x) if keep_inside else None
    positive = _new_bits(x) if keep_positive else None
    _launch(
        _forward_kernel,
        x,
        (x, amax, y, inside, positive, x.numel(), amax.numel(), _stride(x, axis)),
        min_bound=min_bound,
        max_bound=max_bound,
        per_channel=axis is not None,
        keep_inside=keep_inside,
        keep_positive=keep_positive,
    )
    return y, inside, positive


def select(grad: Tensor, bits: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The gradient where the bit is set, else zero; `strides` are those of the x that the bits were made from."""
    if grad.stride() != strides:
        grad = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
    out = torch.empty_like(grad)
    _launch(_select_kernel, out, (grad, bits, out, out.numel()), ones=False)
    return out


def unpack(bits: Tensor, like: tuple[Any, ...]) -> Tensor:
    """A tensor of ones and zeros from bits; `like` is (shape, strides, dtype)."""
    shape, strides, dtype = like
    out = torch.empty_strided(shape, strides, dtype=dtype, device=bits.device)
    _launch(_select_kernel, out, (None, bits, out, out.numel()), ones=True)
    return out


def backward(
    grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int, learned: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradient where the code lies within the bounds, else zero; x dense, the result has its memory format.

    Returns:
        It, and with `learned` (per tensor only) the gradient to the scale, float32, shape ().
    """
    if grad.stride() != x.stride():
        grad = torch.empty_like(x, dtype=grad.dtype).copy_(grad)
    out = torch.empty_like(grad)
    sums = torch.empty(_programs(x), dtype=torch.float32, device=x.device) if learned else None
    _launch(
        _backward_kernel,
        x,
        (grad, x, amax, out, sums, x.numel(), amax.numel(), _stride(x, axis)),
        min_bound=min_bound,
        max_bound=max_bound,
        per_channel=axis is not None,
        learned=learned,
    )
    return out, None if sums is None else sums.sum()


def _new_bits(x: Tensor) -> Tensor:
    return torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)


def _stride(x: Tensor, axis: int | None) -> int:
    return 1 if axis is None else x.stride(axis)


def _programs(x: Tensor) -> int:
    return int(triton.cdiv(x.numel(), ROWS * 8))


def _launch(kernel: Any, x: Tensor, arguments: tuple[Any, ...], **constants: Any) -> None:
    if x.numel():
        with on_device_of(x):
            big = x.numel() >= 2**31 - ROWS * 8
            kernel[(_programs(x),)](*arguments, **constants, big=big, rows=ROWS, num_warps=WARPS)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of x."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
