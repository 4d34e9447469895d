"""Zero padding on a fake-quantized input: zero is on every scale, so the convolution behind it needs no other."""

from __future__ import annotations

from torch import nn

from qat.nn import QuantMixin


class QuantZeroPad1d(QuantMixin, nn.ZeroPad1d):
    """nn.ZeroPad1d on a fake-quantized input."""


class QuantZeroPad2d(QuantMixin, nn.ZeroPad2d):
    """nn.ZeroPad2d on a fake-quantized input."""


class QuantZeroPad3d(QuantMixin, nn.ZeroPad3d):
    """nn.ZeroPad3d on a fake-quantized input."""


class QuantConstantPad1d(QuantMixin, nn.ConstantPad1d):
    """nn.ConstantPad1d, of zeros, on a fake-quantized input."""


class QuantConstantPad2d(QuantMixin, nn.ConstantPad2d):
    """nn.ConstantPad2d, of zeros, on a fake-quantized input."""


class QuantConstantPad3d(QuantMixin, nn.ConstantPad3d):
    """nn.ConstantPad3d, of zeros, on a fake-quantized input."""


PADDING: dict[type[nn.Module], type[QuantMixin]] = {
    nn.ZeroPad1d: QuantZeroPad1d,
    nn.ZeroPad2d: QuantZeroPad2d,
    nn.ZeroPad3d: QuantZeroPad3d,
    nn.ConstantPad1d: QuantConstantPad1d,
    nn.ConstantPad2d: QuantConstantPad2d,
    nn.ConstantPad3d: QuantConstantPad3d,
}
"""Quant class of each zero padding."""
