"""The fake-quantize operator `qat::fake_quantize`: quantize to integers and back, in one step.

    scale = max(amax / max_bound, MIN_SCALE)
    y     = clamp(round_half_even(x / scale), min_bound, max_bound) * scale

All arithmetic is float32, whatever the type of x, and y has the type of x. This is ONNX QuantizeLinear followed by
DequantizeLinear with zero-point 0 (ONNX operator specification), so training, ONNX Runtime and TensorRT
compute the same integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.descriptor import MIN_SCALE

OP_NAME = "qat::fake_quantize"


def compute_scale(amax: Tensor, max_bound: int) -> Tensor:
    """Scale of a quantizer, float32, never below MIN_SCALE; same shape as amax."""
    return (amax.float() / max_bound).clamp_min(MIN_SCALE)


def _broadcast_scale(x: Tensor, amax: Tensor, axis: int | None, max_bound: int) -> Tensor:
    scale = compute_scale(amax, max_bound)
    if axis is None:
        return scale.reshape(())
    return scale.reshape([-1 if dim == axis else 1 for dim in range(x.dim())])


@torch.library.custom_op(OP_NAME, mutates_args=())
def _fake_quantize_op(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    scale = _broadcast_scale(x, amax, axis, max_bound)
    y = torch.empty_like(x)
    codes = y if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
    torch.div(x if x.dtype == torch.float32 else x.float(), scale, out=codes)
    codes.round_().clamp_(min_bound, max_bound).mul_(scale)
    if codes is not y:
        y.copy_(codes)
    return y


@_fake_quantize_op.register_fake
def _(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, amax, ctx.axis, ctx.min_bound, ctx.max_bound = inputs
    ctx.save_for_backward(x, amax)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    x, amax = ctx.saved_tensors
    scale = _broadcast_scale(x, amax, ctx.axis, ctx.max_bound)
    ratio = x.float() / scale
    codes = ratio.round()
    inside = (codes >= ctx.min_bound) & (codes <= ctx.max_bound)
    grad_x = torch.where(inside, grad, 0) if ctx.needs_input_grad[0] else None
    grad_amax = None
    if ctx.needs_input_grad[1]:
        slope = torch.where(inside, codes - ratio, codes.clamp(ctx.min_bound, ctx.max_bound))
        grad_scale = grad.float() * slope
        if ctx.axis is None:
            grad_amax = grad_scale.sum().reshape(amax.shape)
        else:
            grad_amax = grad_scale.sum([d for d in range(x.dim()) if d != ctx.axis]).reshape(amax.shape)
        per_scale = max(x.numel() // max(amax.numel(), 1), 1)
        grad_amax = (grad_amax * (ctx.max_bound / (per_scale * ctx.max_bound) ** 0.5)).to(amax.dtype)
    return grad_x, grad_amax, None, None, None


_fake_quantize_op.register_autograd(_backward, setup_context=_setup_context)


def fake_quantize(
    x: Tensor, amax: Tensor, axis: int | None = None, min_bound: int = -128, max_bound: int = 127
) -> Tensor:
    """Quantize x to integer codes and back.

    The gradient to x is the straight-through estimator (Bengio et al. 2013): 1 where the rounded code lies within
    the bounds, 0 outside. The gradient to amax, computed only where amax requires one, is LSQ's (Esser et al.
    2020, equations 3 and 5), scaled so that a plain gradient step on amax equals LSQ's step on the scale
    times max_bound.

    Args:
        x: floating-point tensor of any shape and memory format.
        amax: float tensor, one element for axis None, else `x.shape[axis]` elements.
        axis: channel dimension of x, negative counts from the end, or None for one scale.
        min_bound: smallest integer code.
        max_bound: largest integer code; the scale is amax / max_bound.

    Returns:
        Tensor like x: same shape, type and memory format.

    Raises:
        TypeError: x is not floating point.
        ValueError: axis or the number of amax elements does not fit x.
    """
    if not x.is_floating_point():
        raise TypeError(f"fake_quantize takes floating-point tensors, not {x.dtype}. Cast the tensor first.")
    if axis is None:
        if amax.numel() != 1:
            raise ValueError(f"amax has {amax.numel()} elements; with axis=None it must have one. Pass the axis.")
    else:
        if not -x.dim() <= axis < x.dim():
            raise ValueError(f"axis={axis} does not exist in a tensor of shape {tuple(x.shape)}.")
        axis %= x.dim()
        if amax.numel() != x.shape[axis]:
            raise ValueError(
                f"amax has {amax.numel()} elements but dimension {axis} of a tensor of shape {tuple(x.shape)} "
                f"has {x.shape[axis]}. They must be equal."
            )
    y: Tensor = torch.ops.qat.fake_quantize.default(x, amax, axis, min_bound, max_bound)
    return y
