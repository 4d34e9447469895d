"""The kernels of `qat.fake_quant_triton`: what one program computes.

An element costs a few bytes of memory traffic, which leaves about twenty instructions in half precision before
arithmetic is what a GPU waits for: every one of them counts here.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qat.descriptor import MIN_SCALE

ROUND: Any = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a float32 below 2**22 half to even."""
FLOOR: Any = tl.constexpr(MIN_SCALE)
LARGEST: Any = tl.constexpr(3.4028234663852886e38)
NAN: Any = tl.constexpr(tl.PropagateNan.ALL)
ONE: Any = tl.constexpr(0)
ONE_FOR_EIGHT: Any = tl.constexpr(1)
ONE_AN_ELEMENT: Any = tl.constexpr(2)


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
    x = clamp(x, low, high)
    ratio = x * inverse
    ratio = tl.fma(tl.fma(-ratio, scale, x), inverse, ratio)
    return tl.fma(tl.fma(-ratio, scale, x), inverse, ratio)


@triton.jit
def code_of(ratio):  # type: ignore[no-untyped-def]
    """The code rounded half to even, not clamped; ratio is below 2**22, or NaN, which stays."""
    return (ratio + ROUND) - ROUND


@triton.jit
def clamp(x, low, high):  # type: ignore[no-untyped-def]
    """x within the bounds; NaN stays."""
    return tl.minimum(tl.maximum(x, low, propagate_nan=NAN), high, propagate_nan=NAN)


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
    x, amax_ptr, groups, offsets, channels, stride, min_bound: tl.constexpr, max_bound: tl.constexpr,
    scales: tl.constexpr,
):  # fmt: skip
    """x / scale and scale; `scales` says whether there is one for all, one for eight neighbours or one an element."""
    if scales == ONE_AN_ELEMENT:
        scale = scale_of(tl.load(amax_ptr + (offsets // stride) % channels), max_bound)
        ratio = clamp(tl.div_rn(x, scale), min_bound - 2, max_bound + 2)
    else:
        if scales == ONE:
            scale = scale_of(tl.load(amax_ptr), max_bound)
        else:
            scale = scale_of(tl.load(amax_ptr + (groups * 8 // stride) % channels), max_bound)[:, None]
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
        ratio = divide(x, scale, inverse, min_bound, max_bound)
    return ratio, scale


@triton.jit
def _pack(bits):  # type: ignore[no-untyped-def]
    """Eight bits (rows, 8) to bytes (rows,)."""
    return tl.sum(tl.where(bits, 1 << tl.arange(0, 8)[None, :], 0), 1).to(tl.uint8)


@triton.jit(do_not_specialize=["channels", "stride"])  # type: ignore[untyped-decorator]
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amax_ptr, y_ptr, bits_ptr, size, channels, stride,
    min_bound: tl.constexpr, max_bound: tl.constexpr, scales: tl.constexpr,
    kept: tl.constexpr, big: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Fake-quantize; with `kept` 1 the bits "within the bounds", with 2 after them the bits "not at or below zero"."""
    groups, offsets = _elements(size, big, rows)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    ratio, scale = _ratio(x, amax_ptr, groups, offsets, channels, stride, min_bound, max_bound, scales)
    code = code_of(ratio)
    clamped = clamp(code, min_bound, max_bound)
    tl.store(y_ptr + offsets, (clamped * scale).to(y_ptr.dtype.element_ty), mask=mask)
    if kept >= 1:
        tl.store(bits_ptr + groups, _pack(clamped == code), mask=groups * 8 < size)
    if kept == 2:  # a NaN is not below zero: ReLU's backward lets its gradient pass
        tl.store(bits_ptr + tl.cdiv(size, 8) + groups, _pack((x <= 0.0) == 0), mask=groups * 8 < size)


@triton.jit  # type: ignore[untyped-decorator]
def select_kernel(  # type: ignore[no-untyped-def]
    out_ptr, grad_ptr, bits_ptr, size, second: tl.constexpr, big: tl.constexpr, rows: tl.constexpr
):
    """The gradient where the first kind of bits is set, else zero; with `second` one where the second kind is."""
    groups, offsets = _elements(size, big, rows)
    mask = offsets < size
    if second:
        bits_ptr += tl.cdiv(size, 8)
    bits = tl.load(bits_ptr + groups, mask=groups * 8 < size, other=0).to(tl.int32)
    chosen = (bits[:, None] & (1 << tl.arange(0, 8)[None, :])) != 0
    if second:
        tl.store(out_ptr + offsets, tl.where(chosen, 1.0, 0.0).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
        tl.store(out_ptr + offsets, tl.where(chosen, grad, tl.zeros_like(grad)), mask=mask)


@triton.jit(do_not_specialize=["channels", "stride"])  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, amax_ptr, out_ptr, sums_ptr, size, channels, stride,
    min_bound: tl.constexpr, max_bound: tl.constexpr, scales: tl.constexpr, learned: tl.constexpr,
    big: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """The gradient from x; with `learned`, this program's part of the gradient to the scale too."""
    groups, offsets = _elements(size, big, rows)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
    ratio, _ = _ratio(x, amax_ptr, groups, offsets, channels, stride, min_bound, max_bound, scales)
    code = code_of(ratio)
    clamped = clamp(code, min_bound, max_bound)
    inside = clamped == code
    tl.store(out_ptr + offsets, tl.where(inside, grad, tl.zeros_like(grad)), mask=mask)
    if learned:
        slope = tl.where(inside, code - ratio, clamped)
        tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.sum(grad.to(tl.float32) * slope, 1), 0))
