"""Fake quantization in eager mode: an autograd function that keeps one bit an element on a GPU, not the activation.

It calls the kernels without torch's dispatcher, whose Python costs more than they do. A layer behind the quantizer
keeps the quantized tensor for its own backward. The tensor before it would be a second copy, and is kept by nothing
but a ReLU that made it, which only needs to know where it is positive: that becomes one bit an element too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qat.fake_quant_reference import (
    amax_gradient,
    forward,
    gpu_kernels,
    input_gradient,
    lsq_gradient,
    triton_kernels,
)

SMALLEST_PACKED = 2**16
"""Elements from which on a ReLU's saved result is worth packing."""


class _Recomputing(torch.autograd.Function):
    """Saves x and recomputes in the backward: on a CPU, and for the gradient to a learned amax."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, rest: tuple[int | None, int, int]) -> Tensor:
        ctx.save_for_backward(x, amax)
        ctx.rest = rest
        return forward(x, amax, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, amax = ctx.saved_tensors
        needs_x, needs_amax = ctx.needs_input_grad[:2]
        kernels = None if torch.is_grad_enabled() else gpu_kernels(x, amax)
        if needs_amax and ctx.rest[0] is None and kernels is not None:
            grad_x, total = kernels.backward(grad, x, amax, *ctx.rest, learned=True)
            return grad_x, lsq_gradient(total, x, amax, *ctx.rest), None
        grad_x = input_gradient(grad, x, amax, *ctx.rest) if needs_x else None
        return grad_x, amax_gradient(grad, x, amax, *ctx.rest) if needs_amax else None, None


class _KeepingBits(torch.autograd.Function):
    """Saves the bits "the code is within the bounds", and packs what a ReLU before it saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, amax: Tensor, rest: tuple[int | None, int, int], kernels: Any, relu: Any
    ) -> Tensor:
        y: Tensor
        y, bits = kernels.forward(x, amax, *rest, kernels.WITHIN if relu is None else kernels.AND_POSITIVE)
        ctx.save_for_backward(bits)
        ctx.kernels, ctx.strides = kernels, x.stride()
        if relu is not None:
            _pack(relu, bits, (x.shape, ctx.strides, x.dtype), kernels)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        select = _Select.apply if torch.is_grad_enabled() else ctx.kernels.select
        return select(grad, bits, ctx.strides), None, None, None, None


class _Select(torch.autograd.Function):
    """The gradient where its bit is set, for a backward pass that is itself differentiated (gradient penalties)."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, bits: Tensor, strides: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.strides = strides
        return triton_kernels().select(grad, bits, strides)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Select.apply(grad, *ctx.saved_tensors, ctx.strides), None, None


def _unpacked_relu(x: Tensor) -> Any:
    """The autograd node of the ReLU that x is the result of, unless its saved result is packed already; else None."""
    node: Any = x.grad_fn
    if type(node).__name__ != "ReluBackward0" or x.numel() < SMALLEST_PACKED or "qat_packed" in node.metadata:
        return None
    return node


def _pack(relu: Any, bits: Tensor, like: tuple[Any, ...], kernels: Any) -> None:
    """Let a ReLU keep bits instead of its result; its backward is given ones and zeros in place of the values."""
    relu.metadata["qat_packed"] = True
    try:
        relu._raw_saved_result.register_hooks(lambda _: bits, lambda kept: kernels.unpack(kept, like))
    except RuntimeError:
        return  # it has hooks already: the user checkpoints or offloads activations


def fake_quantize_eager(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """`qat.fake_quantize` on a plain tensor in eager mode; axis None or not negative."""
    y: Tensor
    recorded = torch.is_grad_enabled() and (x.requires_grad or amax.requires_grad)
    if not recorded and forward_ad._current_level < 0:  # a tangent is refused by the functions below, not dropped
        return forward(x.detach(), amax.detach(), axis, min_bound, max_bound)
    kernels = None if amax.requires_grad else gpu_kernels(x, amax)
    if kernels is None or isinstance(x, torch.nn.Parameter):
        y = _Recomputing.apply(x, amax, (axis, min_bound, max_bound))
    else:
        relu = _unpacked_relu(x)
        y = _KeepingBits.apply(x, amax, (axis, min_bound, max_bound), kernels, relu)
    return y
