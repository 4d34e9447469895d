"""Instance normalization on a fake-quantized input; scale, shift and statistics stay float."""

from __future__ import annotations

from torch import nn

from qat.nn.base import QuantMixin


class QuantInstanceNorm1d(QuantMixin, nn.InstanceNorm1d):
    """nn.InstanceNorm1d on a fake-quantized input."""


class QuantInstanceNorm2d(QuantMixin, nn.InstanceNorm2d):
    """nn.InstanceNorm2d on a fake-quantized input."""


class QuantInstanceNorm3d(QuantMixin, nn.InstanceNorm3d):
    """nn.InstanceNorm3d on a fake-quantized input."""
