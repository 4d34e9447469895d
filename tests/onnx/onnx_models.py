"""Small calibrated models, and access to what is in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from qat import nn as qnn
from qat.quantizer import QuantizerState, TensorQuantizer, name_quantizers, named_quantizers, set_quantizer_state


class Residual(nn.Module):
    """Conv, BatchNorm, ReLU, depthwise conv, quantized residual add, pooling, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = qnn.QuantConv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.depthwise = qnn.QuantConv2d(16, 16, 3, padding=1, groups=16)
        self.add = qnn.QuantAdd()
        self.pool = qnn.QuantMaxPool2d(2)
        self.fc = qnn.QuantLinear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.relu(self.add(self.depthwise(x), x))
        return self.fc(self.pool(x).mean((2, 3)))


class Tokens(nn.Module):
    """Linear on 3-D inputs, LayerNorm, attention products with a shared quantizer, HardSwish."""

    def __init__(self) -> None:
        super().__init__()
        self.q = qnn.QuantLinear(32, 32)
        self.k = qnn.QuantLinear(32, 32)
        self.k._input_quantizer = self.q._input_quantizer
        self.norm = nn.LayerNorm(32)
        self.act = nn.Hardswish()
        self.scores = qnn.QuantMatmul()
        self.out = qnn.QuantLinear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        scores = self.scores(self.q(x), self.k(x).transpose(1, 2)).softmax(-1)
        return self.out(self.act(scores @ x).flatten(1).unflatten(1, (-1, 32)))


class Upsample(nn.Module):
    """ConvTranspose and a concat with one quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = qnn.QuantConv2d(3, 8, 3, stride=2, padding=1)
        self.up = qnn.QuantConvTranspose2d(8, 6, 2, stride=2)
        self.concat = qnn.QuantConcat()

    def forward(self, x: Tensor) -> Tensor:
        return self.concat([self.up(torch.relu(self.down(x))), x])


class Recurrent(nn.Module):
    """Bidirectional LSTM over five steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = qnn.QuantLSTM(12, 16, batch_first=True, bidirectional=True)
        self.cell = qnn.QuantLSTMCell(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        h, _ = self.cell(y[:, -1])
        return h


def inputs_for(model: nn.Module, batch: int = 2) -> Tensor:
    shapes = {Residual: (3, 12, 12), Tokens: (6, 32), Upsample: (3, 8, 8), Recurrent: (5, 12)}
    return torch.randn(batch, *shapes[type(model)])


def calibrated(model: nn.Module, x: Tensor | None = None) -> nn.Module:
    """The model with BatchNorm statistics that are not trivial and max calibration on one batch."""
    x = inputs_for(model, 4) if x is None else x
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    model.eval()
    name_quantizers(model)
    set_quantizer_state(model, QuantizerState.CALIBRATING)
    with torch.no_grad():
        model(x)
    for _, quantizer in named_quantizers(model):
        quantizer.load_calib_amax()
    set_quantizer_state(model, QuantizerState.QUANTIZING)
    return model


def quantizer(model: nn.Module, name: str) -> TensorQuantizer:
    found = model.get_submodule(name)
    assert isinstance(found, TensorQuantizer)
    return found


def initializers(path: str | Path) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def replace_initializer(proto: Any, name: str, array: Any) -> None:
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), name))


def ops(path: str | Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]
