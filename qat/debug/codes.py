"""Integer codes of a tensor, as its quantizer computes them."""

from __future__ import annotations

from torch import Tensor, nn

from qat.quantizer import TensorQuantizer


def is_parameter(x: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def per_channel(quantizer: TensorQuantizer, values: Tensor, x: Tensor) -> Tensor:
    """Values of shape (C,), one a channel, shaped to go with x; one of shape () as it is."""
    axis = quantizer.descriptor.axis
    if axis is None:
        return values
    return values.reshape([-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())])


def unclamped_codes(quantizer: TensorQuantizer, x: Tensor) -> Tensor:
    """x / scale rounded half to even, float32, before the clamp to the integer range."""
    scale = quantizer.scale
    assert scale is not None
    return (x.detach().float() / per_channel(quantizer, scale, x)).round_()


def is_clipped(quantizer: TensorQuantizer, codes: Tensor) -> Tensor:
    """True where a code from `unclamped_codes` is outside the integer range."""
    return (codes > quantizer.descriptor.max_bound) | (codes < quantizer.descriptor.min_bound)
