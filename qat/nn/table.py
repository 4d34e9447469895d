"""Which quant class replaces which torch.nn class, and which instances it cannot replace."""

from __future__ import annotations

from torch import nn

from qat.nn.base import QuantMixin
from qat.nn.conv import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from qat.nn.instancenorm import QuantInstanceNorm1d, QuantInstanceNorm2d, QuantInstanceNorm3d
from qat.nn.linear import QuantLinear
from qat.nn.lstm import QuantLSTM
from qat.nn.lstm_cell import QuantLSTMCell
from qat.nn.obstacles import find_obstacle
from qat.nn.pooling import (
    QuantAdaptiveAvgPool1d,
    QuantAdaptiveAvgPool2d,
    QuantAdaptiveAvgPool3d,
    QuantAvgPool1d,
    QuantAvgPool2d,
    QuantAvgPool3d,
    QuantMaxPool1d,
    QuantMaxPool2d,
    QuantMaxPool3d,
)

QUANT_CLASSES: dict[type[nn.Module], type[QuantMixin]] = {
    nn.Conv1d: QuantConv1d,
    nn.Conv2d: QuantConv2d,
    nn.Conv3d: QuantConv3d,
    nn.ConvTranspose1d: QuantConvTranspose1d,
    nn.ConvTranspose2d: QuantConvTranspose2d,
    nn.ConvTranspose3d: QuantConvTranspose3d,
    nn.Linear: QuantLinear,
    nn.LSTM: QuantLSTM,
    nn.LSTMCell: QuantLSTMCell,
    nn.MaxPool1d: QuantMaxPool1d,
    nn.MaxPool2d: QuantMaxPool2d,
    nn.MaxPool3d: QuantMaxPool3d,
    nn.AvgPool1d: QuantAvgPool1d,
    nn.AvgPool2d: QuantAvgPool2d,
    nn.AvgPool3d: QuantAvgPool3d,
    nn.AdaptiveAvgPool1d: QuantAdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: QuantAdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: QuantAdaptiveAvgPool3d,
    nn.InstanceNorm1d: QuantInstanceNorm1d,
    nn.InstanceNorm2d: QuantInstanceNorm2d,
    nn.InstanceNorm3d: QuantInstanceNorm3d,
}
"""Quant class of each torch.nn class that has one."""


def _float_class(module: nn.Module) -> type[nn.Module] | None:
    return next((cls for cls in type(module).__mro__ if cls in QUANT_CLASSES), None)


def quant_class_for(module: nn.Module) -> type[QuantMixin] | None:
    """Quant class of the torch.nn class that the module is an instance of, subclasses included; None without one."""
    cls = _float_class(module)
    return None if cls is None else QUANT_CLASSES[cls]


def conversion_obstacle(module: nn.Module) -> str | None:
    """Reason why `quant_class_for(module).convert_(module)` would be refused, or None where it works.

    The reason completes the sentence "the layer stays float because ...".
    """
    cls = _float_class(module)
    if cls is None:
        return f"{type(module).__name__} has no quant class"
    return find_obstacle(module, cls)
