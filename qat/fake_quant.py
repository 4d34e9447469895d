"""The fake-quantize operator `qat::fake_quantize`: quantize to integers and back, in one step.

    scale = max(amax / max_bound, MIN_SCALE)
    y     = clamp(round_half_even(x / scale), min_bound, max_bound) * scale

All arithmetic is float32, whatever the type of x, and y has the type of x. This is ONNX QuantizeLinear followed by
DequantizeLinear with zero-point 0 (ONNX operator specification), so training, ONNX Runtime and TensorRT
compute the same integers.

Three ways lead to the same bits: eager calls go through `qat.fake_quant_eager`, torch.compile traces
`qat.fake_quant_compiled`, and torch.export and tensor subclasses get the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qat.fake_quant_compiled import fake_quantize_compiled
from qat.fake_quant_eager import fake_quantize_eager
from qat.fake_quant_reference import amax_gradient, compute_scale, forward, input_gradient

__all__ = ["OP_NAME", "compute_scale", "fake_quantize"]
OP_NAME = "qat::fake_quantize"
"""The operator's name in `torch.library`."""


@torch.library.custom_op(OP_NAME, mutates_args=())
def _operator(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    return forward(x, amax, axis, min_bound, max_bound)


@torch.library.custom_op(OP_NAME + "_backward", mutates_args=())
def _operator_backward(
    grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int
) -> Tensor:
    return input_gradient(grad, x, amax, axis, min_bound, max_bound)


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
    return grad_x, amax_gradient(*arguments) if needs_amax else None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


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
    if torch.compiler.is_compiling():
        if not torch.compiler._is_exporting_flag:  # is_exporting() is true in every torch.compile up to torch 2.11
            return fake_quantize_compiled(x, amax, axis, min_bound, max_bound)
    elif type(x) in (Tensor, nn.Parameter):
        return fake_quantize_eager(x, amax, axis, min_bound, max_bound)
    result: Tensor = torch.ops.qat.fake_quantize.default(x, amax, axis, min_bound, max_bound)
    return result
