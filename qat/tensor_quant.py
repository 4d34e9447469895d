"""Descriptors and functions under the names of pytorch-quantization's `tensor_quant`, for scripts that move in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.descriptor import QUANT_DESC_8BIT_PER_TENSOR, QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL, QuantDescriptor
from qat.errors import DescriptorError
from qat.fake_quant import compute_scale, fake_quantize

__all__ = [
    "QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW",
    "QUANT_DESC_8BIT_PER_TENSOR",
    "QuantDescriptor",
    "ScaledQuantDescriptor",
    "fake_tensor_quant",
    "tensor_quant",
]

ScaledQuantDescriptor = QuantDescriptor
"""The same class: ours has no scale factor of its own."""
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
"""One scale an output channel: axis 0."""
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
"""One scale an output channel: axis 0."""
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
"""One scale an output channel: axis 0."""
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
"""One scale an output channel: axis 0."""
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(axis=1, narrow_range=True)
"""Their default, so their checkpoints need it. TensorRT runs the layer in float: ours has one scale."""
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL
"""As `QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL`."""
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL
"""As `QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL`."""

_REFUSED = {
    "QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR": "TensorRT reads UINT8 as INT8, so the engine would compute other numbers",
    "fake_affine_tensor_quant": "TensorRT takes a zero-point of 0 only",
    "legacy_fake_tensor_quant": "it equals fake_tensor_quant",
    "scaled_e4m3": "FP8 is not offered, INT8 is",
}


def __getattr__(name: str) -> Any:
    reason = f": {_REFUSED[name]}. See docs/from_pytorch_quantization.md." if name in _REFUSED else ""
    raise AttributeError(f"module 'qat.tensor_quant' has no attribute {name!r}{reason}")


def fake_tensor_quant(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """`qat.fake_quantize` with the axis taken from the shape of amax.

    Args:
        inputs: floating-point tensor.
        amax: one element, or as many dimensions as `inputs`, all but one of size 1.
        num_bits: width of the integer.
        unsigned: must be False.
        narrow_range: smallest code is -127 for 8 bits, else -128.

    Raises:
        DescriptorError: unsigned, or a width outside 2..8.
        ValueError: amax of another shape.
    """
    axis, d = _describe(inputs, amax, num_bits, unsigned, narrow_range)
    return fake_quantize(inputs, amax.reshape(() if axis is None else (-1,)), axis, d.min_bound, d.max_bound)


def tensor_quant(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> tuple[Tensor, Tensor]:
    """Integer codes, as the type of `inputs`, and what to divide them by to get the values back.

    Arguments and errors as for `fake_tensor_quant`. No gradient passes: train with `fake_tensor_quant`.
    """
    _, d = _describe(inputs, amax, num_bits, unsigned, narrow_range)
    step = compute_scale(amax.detach(), d.max_bound)
    codes = (inputs.detach().float() / step).round().clamp(d.min_bound, d.max_bound)
    return codes.to(inputs.dtype), (1 / step).to(inputs.dtype)


def _describe(
    inputs: Tensor, amax: Tensor, num_bits: int, unsigned: bool, narrow_range: bool
) -> tuple[int | None, QuantDescriptor]:
    if bool((amax < 0).any()) or not bool(torch.isfinite(amax).all()):
        raise DescriptorError("amax has a negative or non-finite value. Calibrate again, or give a positive amax.")
    axis = None
    if amax.numel() > 1:
        axes = [dim for dim, size in enumerate(amax.shape) if size > 1]
        if amax.dim() != inputs.dim() or len(axes) != 1:
            raise ValueError(
                f"amax of shape {tuple(amax.shape)} does not tell the axis of inputs of shape {tuple(inputs.shape)}. "
                "Give it as many dimensions, all but one of size 1, or call qat.fake_quantize with axis=."
            )
        axis = axes[0]
    return axis, QuantDescriptor(num_bits=num_bits, unsigned=unsigned, narrow_range=narrow_range, axis=axis)
