"""One small instance of every quant module, and what the tests of this folder share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import qat.nn as qnn
from qat.quantizer import QuantizerState, named_quantizers, set_quantizer_state


@dataclass(frozen=True)
class Case:
    """A torch class, its constructor arguments, and the shape of an input."""

    float_class: type[nn.Module]
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def quant_class(self) -> type[qnn.QuantMixin]:
        return qnn.QUANT_CLASSES[self.float_class]

    def make_float(self) -> nn.Module:
        return self.float_class(*self.args, **self.kwargs)

    def make_quant(self, **extra: Any) -> qnn.QuantMixin:
        return self.quant_class(*self.args, **self.kwargs, **extra)

    def input(self) -> Tensor:
        return torch.randn(self.shape)

    def __str__(self) -> str:
        options = "-".join(f"{key}={value}" for key, value in self.kwargs.items())
        return f"{self.float_class.__name__}-{options}" if options else self.float_class.__name__


WEIGHTED = [
    Case(nn.Conv1d, (4, 6, 3), (2, 4, 9), {"padding": 2, "padding_mode": "circular"}),
    Case(nn.Conv2d, (4, 6, 3), (2, 4, 7, 7), {"stride": 2, "groups": 2, "bias": False}),
    Case(nn.Conv2d, (4, 6, 3), (2, 4, 7, 7), {"padding": "same", "padding_mode": "reflect", "dilation": 2}),
    Case(nn.Conv3d, (2, 4, 3), (2, 2, 5, 5, 5), {"padding": 1}),
    Case(nn.ConvTranspose1d, (4, 6, 3), (2, 4, 5), {"stride": 2, "output_padding": 1}),
    Case(nn.ConvTranspose2d, (4, 6, 3), (2, 4, 5, 5), {"stride": 2, "groups": 2, "dilation": 2}),
    Case(nn.ConvTranspose3d, (2, 4, 2), (2, 2, 3, 3, 3), {"bias": False}),
    Case(nn.Linear, (5, 7), (2, 3, 5)),
    Case(nn.Linear, (5, 7), (4, 5), {"bias": False}),
]
UNWEIGHTED = [
    Case(nn.MaxPool1d, (2,), (2, 3, 8), {"return_indices": True}),
    Case(nn.MaxPool2d, (3,), (2, 3, 8, 8), {"stride": 2, "padding": 1}),
    Case(nn.MaxPool3d, (2,), (2, 3, 4, 4, 4)),
    Case(nn.AvgPool1d, (2,), (2, 3, 8)),
    Case(nn.AvgPool2d, (3,), (2, 3, 8, 8), {"padding": 1, "count_include_pad": False}),
    Case(nn.AvgPool3d, (2,), (2, 3, 4, 4, 4)),
    Case(nn.AdaptiveAvgPool1d, (3,), (2, 3, 8)),
    Case(nn.AdaptiveAvgPool2d, (1,), (2, 3, 8, 8)),
    Case(nn.AdaptiveAvgPool3d, (2,), (2, 3, 4, 4, 4)),
    Case(nn.InstanceNorm1d, (3,), (2, 3, 8), {"affine": True}),
    Case(nn.InstanceNorm2d, (3,), (2, 3, 8, 8)),
    Case(nn.InstanceNorm3d, (3,), (2, 3, 4, 4, 4), {"affine": True}),
]
RECURRENT = [
    Case(nn.LSTM, (4, 5), (6, 3, 4)),
    Case(nn.LSTM, (4, 5), (3, 6, 4), {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    Case(nn.LSTM, (4, 5), (6, 3, 4), {"num_layers": 2, "bidirectional": True, "proj_size": 3, "bias": False}),
    Case(nn.LSTMCell, (4, 5), (3, 4)),
    Case(nn.LSTMCell, (4, 5), (3, 4), {"bias": False}),
]
ALL = WEIGHTED + UNWEIGHTED + RECURRENT


def calibrate(module: nn.Module, *inputs: Any) -> None:
    """Max calibration on one call, then quantizing."""
    set_quantizer_state(module, QuantizerState.CALIBRATING)
    with torch.no_grad():
        module(*inputs)
    for _, quantizer in named_quantizers(module):
        quantizer.load_calib_amax()
    set_quantizer_state(module, QuantizerState.QUANTIZING)


def reference(x: Tensor, axis: int | None = None, narrow: bool = False) -> Tensor:
    """Quantize and dequantize by the maximum, in NumPy float32, zero-point 0."""
    values = x.detach().numpy()
    others = None if axis is None else tuple(d for d in range(values.ndim) if d != axis)
    amax = np.abs(values).max(axis=others, keepdims=axis is not None).astype(np.float32)
    scale = amax / np.float32(127)
    codes = np.clip(np.rint(values / scale), -127 if narrow else -128, 127).astype(np.float32)
    return torch.from_numpy(codes * scale)


def first(output: Any) -> Tensor:
    """The tensor of an output, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) else output


def assert_same(actual: Any, expected: Any) -> None:
    """Equal bit for bit, through nested tuples."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
