"""Fake quantization as torch.compile sees it: elementwise operations that Inductor fuses with their neighbours.

The bits are those of the reference. A division may be an approximate one in generated code, so x is multiplied by the
reciprocal in float64 and rounded to float32: the product is within 2**-52 of the quotient of two float32 values, and
such a quotient is never that close to a midpoint between two float32 values.

No conversion to the type that a tensor has already: torch 2.11 returns every intermediate value of an autograd function
beside its result, and gives the result no gradient where another of them is the same tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.fake_quant_reference import broadcast_scale, lsq_gradient, scale_gradient


def _ratio(x: Tensor, scale: Tensor) -> Tensor:
    return (x.double() * scale.double().reciprocal()).float()


class _Compiled(torch.autograd.Function):
    """Saves x, from which the partitioner of torch.compile recomputes what the backward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, axis: int | None, low: int, high: int, learned: bool) -> Tensor:
        ctx.save_for_backward(x, amax)
        ctx.axis, ctx.low, ctx.high, ctx.learned = axis, low, high, learned
        scale = broadcast_scale(x, amax, axis, high)
        y: Tensor = _ratio(x, scale).round().clamp(low, high) * scale
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, amax = ctx.saved_tensors
        axis, low, high = ctx.axis, ctx.low, ctx.high
        ratio = _ratio(x, broadcast_scale(x, amax, axis, high))
        codes = ratio.round()
        inside = (codes >= low) & (codes <= high)
        grad_x = torch.where(inside, grad, 0)
        if not ctx.learned:
            return grad_x, None, None, None, None, None
        total = scale_gradient(grad, ratio, axis, low, high)
        return grad_x, lsq_gradient(total, x, amax, axis, low, high), None, None, None, None


def fake_quantize_compiled(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """`qat.fake_quantize` inside torch.compile; axis None or not negative."""
    y: Tensor = _Compiled.apply(x, amax, axis, min_bound, max_bound, amax.requires_grad)
    return y
