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
from torch import Tensor, nn

from qat.descriptor import MIN_SCALE

OP_NAME = "qat::fake_quantize"


def compute_scale(amax: Tensor, max_bound: int) -> Tensor:
    """Scale of a quantizer, float32, never below MIN_SCALE; same shape as amax."""
    amax = amax.float()
    # Dividing by a Python number multiplies by its reciprocal on a GPU, which is another float32.
    return (amax / torch.full_like(amax, max_bound)).clamp_min(MIN_SCALE)


def _broadcast_scale(x: Tensor, amax: Tensor, axis: int | None, max_bound: int) -> Tensor:
    scale = compute_scale(amax, max_bound)
    if axis is None:
        return scale.reshape(())
    return scale.reshape([-1 if dim == axis else 1 for dim in range(x.dim())])


def _gpu_kernels(x: Tensor, amax: Tensor) -> Any:
    """The Triton kernels where they can take x: on a GPU, dense memory, float32 amax, Triton installed; else None."""
    if not x.is_cuda or x.dtype == torch.float64 or amax.dtype != torch.float32 or not amax.is_contiguous():
        return None
    try:
        from qat import fake_quant_triton
    except ImportError:
        return None
    return fake_quant_triton if fake_quant_triton.is_dense(x) else None


def _forward(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    kernels = _gpu_kernels(x, amax)
    if kernels is not None:
        y: Tensor = kernels.forward(x, amax, axis, min_bound, max_bound)
        return y
    scale = _broadcast_scale(x, amax, axis, max_bound)
    y = torch.empty_like(x)
    codes = y if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
    torch.div(x if x.dtype == torch.float32 else x.float(), scale, out=codes)
    codes.round_().clamp_(min_bound, max_bound).mul_(scale)
    if codes is not y:
        y.copy_(codes)
    return y


def _input_gradient(grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    kernels = _gpu_kernels(x, amax)
    if kernels is not None:
        out: Tensor = kernels.backward(grad, x, amax, axis, min_bound, max_bound)
        return out
    codes = (x.float() / _broadcast_scale(x, amax, axis, max_bound)).round_()
    return torch.where((codes >= min_bound) & (codes <= max_bound), grad, 0)


def _amax_gradient(grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    ratio = x.float() / _broadcast_scale(x, amax, axis, max_bound)
    codes = ratio.round()
    inside = (codes >= min_bound) & (codes <= max_bound)
    grad_scale = grad.float() * torch.where(inside, codes - ratio, codes.clamp(min_bound, max_bound))
    others = [d for d in range(x.dim()) if d != axis]
    total = grad_scale.sum() if axis is None else grad_scale.sum(others)
    # A weight, whose codes are symmetric, has no batch; of an activation only one sample's features count.
    samples = 1 if min_bound == -max_bound or axis == 0 or x.dim() == 0 else x.shape[0]
    per_scale = max(x.numel() // max(amax.numel() * samples, 1), 1)
    gradient: Tensor = (total.reshape(amax.shape) * (max_bound / (per_scale * max_bound) ** 0.5)).to(amax.dtype)
    return gradient


@torch.library.custom_op(OP_NAME, mutates_args=())
def _operator(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    return _forward(x, amax, axis, min_bound, max_bound)


@torch.library.custom_op(OP_NAME + "_backward", mutates_args=())
def _operator_backward(
    grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int
) -> Tensor:
    return _input_gradient(grad, x, amax, axis, min_bound, max_bound)


@_operator.register_fake
def _(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    return torch.empty_like(x)


@_operator_backward.register_fake
def _(grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    return torch.empty_like(x, dtype=grad.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, amax, ctx.axis, ctx.min_bound, ctx.max_bound = inputs
    ctx.save_for_backward(x, amax)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    arguments = (grad, *ctx.saved_tensors, ctx.axis, ctx.min_bound, ctx.max_bound)
    needs_x, needs_amax = ctx.needs_input_grad[:2]
    grad_x = torch.ops.qat.fake_quantize_backward.default(*arguments) if needs_x else None
    return grad_x, _amax_gradient(*arguments) if needs_amax else None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


class _EagerFakeQuantize(torch.autograd.Function):
    """The operator without the dispatcher, whose Python costs more than the kernels on a GPU."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        _setup_context(ctx, arguments, arguments[0])
        return _forward(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        arguments = (grad, *ctx.saved_tensors, ctx.axis, ctx.min_bound, ctx.max_bound)
        needs_x, needs_amax = ctx.needs_input_grad[:2]
        grad_x = _input_gradient(*arguments) if needs_x else None
        return grad_x, _amax_gradient(*arguments) if needs_amax else None, None, None, None


def fake_quantize(
    x: Tensor, amax: Tensor, axis: int | None = None, min_bound: int = -128, max_bound: int = 127
) -> Tensor:
    """Quantize x to integer codes and back.

    The gradient to x is the straight-through estimator (Bengio et al. 2013): 1 where the rounded code lies within
    the bounds, 0 outside. The gradient to amax, computed only where amax requires one, is LSQ's (Esser et al.
    2020): equation 3 times 1 / sqrt(N * max_bound) of section 2.2, scaled so that a plain gradient step on amax
    equals LSQ's step on the scale times max_bound. N is the number of weights that share the scale, or of features
    of one sample (dimension 0 counts samples), so that the step does not depend on how a batch is divided. Bounds
    that are symmetric mean a weight.

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
    eager = type(x) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    apply = _EagerFakeQuantize.apply if eager else torch.ops.qat.fake_quantize.default
    y: Tensor = apply(x, amax, axis, min_bound, max_bound)
    return y
