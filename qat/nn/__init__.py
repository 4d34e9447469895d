"""Quantized counterparts of torch.nn modules, and Add, Concat and Matmul modules that are placed by hand."""

from __future__ import annotations

from typing import Any

from qat.nn.base import QuantMixin
from qat.nn.conv import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from qat.nn.elementwise import QuantAdd, QuantConcat, QuantMatmul
from qat.nn.instancenorm import QuantInstanceNorm1d, QuantInstanceNorm2d, QuantInstanceNorm3d
from qat.nn.linear import QuantLinear
from qat.nn.lstm import QuantLSTM
from qat.nn.lstm_cell import QuantLSTMCell
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
from qat.nn.table import QUANT_CLASSES, conversion_obstacle, quant_class_for
from qat.quantizer import TensorQuantizer

__all__ = [
    "QUANT_CLASSES",
    "QuantAdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool3d",
    "QuantAdd",
    "QuantAvgPool1d",
    "QuantAvgPool2d",
    "QuantAvgPool3d",
    "QuantConcat",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantInstanceNorm1d",
    "QuantInstanceNorm2d",
    "QuantInstanceNorm3d",
    "QuantLSTM",
    "QuantLSTMCell",
    "QuantLinear",
    "QuantMatmul",
    "QuantMaxPool1d",
    "QuantMaxPool2d",
    "QuantMaxPool3d",
    "QuantMixin",
    "TensorQuantizer",
    "conversion_obstacle",
    "quant_class_for",
]


def __getattr__(name: str) -> Any:
    """pytorch-quantization's short names, such as `Conv2d` for QuantConv2d."""
    for quant in QUANT_CLASSES.values():
        if quant.__name__ == f"Quant{name}":
            return quant
    raise AttributeError(f"module 'qat.nn' has no attribute {name!r}")
