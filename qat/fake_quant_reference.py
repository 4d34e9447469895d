"""Fake quantization and its gradients in torch: the reference, and what runs where no kernel does.

The functions take axis None or not negative, and give way to the GPU kernels where those can take the tensor; both
compute the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from qat.descriptor import MIN_SCALE


def compute_scale(amax: Tensor, max_bound: int) -> Tensor:
    """Scale of a quantizer, float32, never below MIN_SCALE; same shape as amax."""
    amax = amax if amax.dtype == torch.float32 else amax.float()
    # Dividing by a Python number multiplies by its reciprocal on a GPU, which is another float32.
    return (amax / torch.full_like(amax, max_bound)).clamp_min(MIN_SCALE)


def broadcast_scale(x: Tensor, amax: Tensor, axis: int | None, max_bound: int) -> Tensor:
    """The scale, shaped to broadcast over x."""
    scale = compute_scale(amax, max_bound)
    if axis is None:
        return scale.reshape(())
    return scale.reshape([-1 if dim == axis else 1 for dim in range(x.dim())])


def gpu_kernels(x: Tensor, amax: Tensor) -> Any:
    """The Triton kernels where they can take x: on a GPU, dense memory, float32 amax, Triton installed; else None."""
    if not x.is_cuda or x.dtype == torch.float64 or amax.dtype != torch.float32 or not amax.is_contiguous():
        return None
    kernels = triton_kernels()
    return kernels if kernels is not None and kernels.is_dense(x) else None


@cache
def triton_kernels() -> Any:
    """The module of the Triton kernels; None where there is no Triton."""
    try:
        from qat import fake_quant_triton
    except ImportError:
        return None
    return fake_quant_triton


def forward(x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """The operator without autograd; axis None or not negative."""
    kernels = gpu_kernels(x, amax)
    if kernels is not None:
        y: Tensor = kernels.forward(x, amax, axis, min_bound, max_bound)[0]
        return y
    scale = broadcast_scale(x, amax, axis, max_bound)
    y = torch.empty_like(x)
    codes = y if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
    torch.div(x if x.dtype == torch.float32 else x.float(), scale, out=codes)
    codes.round_().clamp_(min_bound, max_bound).mul_(scale)
    if codes is not y:
        y.copy_(codes)
    return y


def input_gradient(grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """The gradient where the rounded code lies within the bounds, else zero; with grad mode on differentiable."""
    kernels = None if torch.is_grad_enabled() else gpu_kernels(x, amax)
    if kernels is not None:
        out: Tensor = kernels.backward(grad, x, amax, axis, min_bound, max_bound)[0]
        return out
    codes = (x.float() / broadcast_scale(x, amax, axis, max_bound)).round_()
    return torch.where((codes >= min_bound) & (codes <= max_bound), grad, 0)


def amax_gradient(grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """LSQ's gradient to amax."""
    ratio = x.float() / broadcast_scale(x, amax, axis, max_bound)
    return lsq_gradient(scale_gradient(grad, ratio, axis, min_bound, max_bound), x, amax, axis, min_bound, max_bound)


def scale_gradient(grad: Tensor, ratio: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """The gradients times the slopes, summed over the elements of each scale; `ratio` is x / scale."""
    codes = ratio.round()
    inside = (codes >= min_bound) & (codes <= max_bound)
    part = grad.float() * torch.where(inside, codes - ratio, codes.clamp(min_bound, max_bound))
    return part.sum() if axis is None else part.sum([d for d in range(ratio.dim()) if d != axis])


def lsq_gradient(total: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int) -> Tensor:
    """The gradient to amax from `total`, the gradients times the slopes summed over the elements of each scale."""
    # A weight, whose codes are symmetric, has no batch; of an activation only one sample's features count.
    samples = 1 if min_bound == -max_bound or axis == 0 or x.dim() == 0 else x.shape[0]
    per_scale = max(x.numel() // max(amax.numel() * samples, 1), 1)
    gradient: Tensor = (total.reshape(amax.shape) * (max_bound / (per_scale * max_bound) ** 0.5)).to(amax.dtype)
    return gradient
