"""Pooling on a fake-quantized input.

Max pooling passes a scale through and needs no quantizer of its own where its input is quantized already; average
pooling runs in INT8 when its input and its output are quantized (the output by the layer that follows).
"""

from __future__ import annotations

from torch import nn

from qat.nn.base import QuantMixin


class QuantMaxPool1d(QuantMixin, nn.MaxPool1d):
    """nn.MaxPool1d on a fake-quantized input."""


class QuantMaxPool2d(QuantMixin, nn.MaxPool2d):
    """nn.MaxPool2d on a fake-quantized input."""


class QuantMaxPool3d(QuantMixin, nn.MaxPool3d):
    """nn.MaxPool3d on a fake-quantized input."""


class QuantAvgPool1d(QuantMixin, nn.AvgPool1d):
    """nn.AvgPool1d on a fake-quantized input."""


class QuantAvgPool2d(QuantMixin, nn.AvgPool2d):
    """nn.AvgPool2d on a fake-quantized input."""


class QuantAvgPool3d(QuantMixin, nn.AvgPool3d):
    """nn.AvgPool3d on a fake-quantized input."""


class QuantAdaptiveAvgPool1d(QuantMixin, nn.AdaptiveAvgPool1d):
    """nn.AdaptiveAvgPool1d on a fake-quantized input."""


class QuantAdaptiveAvgPool2d(QuantMixin, nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d on a fake-quantized input."""


class QuantAdaptiveAvgPool3d(QuantMixin, nn.AdaptiveAvgPool3d):
    """nn.AdaptiveAvgPool3d on a fake-quantized input."""
