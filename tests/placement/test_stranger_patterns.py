"""Patterns that networks from strangers showed (examples/): heads with decoding, lists of one tensor, float cells."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from placement_validator import calibrated
from qat.onnx.lint import Severity, assert_clean, lint
from qat.placement import prepare

C = 32


class Decoding(nn.Module):
    """Two heads of a detector, whose maps become boxes by a grid, an exponential and a concat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(C, C, 3, 2, 1), nn.Conv2d(C, C, 3, 2, 1)
        self.heads = nn.ModuleList(nn.Conv2d(C, 20, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.first(x))
        boxes = []
        for head, features in zip(self.heads, (a, F.silu(self.second(a))), strict=True):
            y = head(features).flatten(2).transpose(1, 2)
            grid = torch.arange(y.shape[1]).view(1, -1, 1).expand(1, -1, 2).to(y)
            xy = (y[..., :2].sigmoid() * 2 - 0.5 + grid) * 8
            boxes.append(torch.cat((xy, y[..., 2:4].exp() * 8, y[..., 4:5].sigmoid() * y[..., 5:].sigmoid()), -1))
        return torch.cat(boxes, 1)


class SumOfBranches(nn.Module):
    """A 1x1 convolution that is added to an activation is no head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        return y + self.second(y)


class Dense(nn.Module):
    """A dense residual block (ESRGAN): the first concat joins one tensor, which is the identity as well."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(C * (1 + i), C, 3, padding=1) for i in range(3))
        self.last = nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for conv in self.convs:
            maps.append(F.relu(conv(torch.cat(maps, 1))))
        return self.last(maps[-1] * 0.2 + x)


class CastWeight(nn.Module):
    """The weight is brought to the type of the input, as code for mixed precision does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(C, C, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(C, C, 3, 3) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.relu(self.first(x)), self.weight.type_as(x))


class Cell(nn.Module):
    """Words through a convolution, an LSTM cell by hand, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cell, self.project = nn.Conv1d(C, C, 3, padding=1), nn.LSTMCell(C, C), nn.Linear(C, C)
        self.tag = nn.Linear(C, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        h = c = x.new_zeros(x.shape[0], C)
        states = []
        for t in range(x.shape[2]):
            h, c = self.cell(x[:, :, t], (h, c))
            states.append(h)
        return self.tag(F.relu(self.project(torch.stack(states, 1))))


def test_heads_whose_outputs_are_decoded_are_logits(tmp_path: Path) -> None:
    x = torch.randn(2, C, 16, 16)
    model = calibrated(prepare(Decoding().eval(), x), (x,))
    left_float = qat.summary(model).left_float
    assert {f"heads.{i}" for i in range(2)} <= set(left_float) and "logits" in left_float["heads.1"]
    assert not {"first", "second"} & set(left_float)
    assert_clean(qat.export(model, x, tmp_path / "m.onnx").path)


def test_a_branch_of_a_sum_is_no_logits_layer() -> None:
    x = torch.randn(2, C, 8, 8)
    assert "second" not in qat.summary(prepare(SumOfBranches().eval(), x)).left_float


def test_a_concat_of_one_tensor_passes_its_scale_on(tmp_path: Path) -> None:
    x = torch.randn(2, C, 8, 8)
    model = calibrated(prepare(Dense().eval(), x), (x,))
    readers = [set(row.readers) for row in qat.summary(model).quantizers]
    assert any("convs.0" in found and any("add" in name for name in found) for found in readers)
    assert_clean(qat.export(model, x, tmp_path / "m.onnx").path)


def test_a_weight_cast_to_the_type_of_the_input_is_a_weight() -> None:
    x = torch.randn(2, C, 8, 8)
    model = calibrated(prepare(CastWeight().eval(), x), (x,))
    assert qat.summary(model).left_float == {}
    assert any(row.channels == C and row.name == "_weight_quantizer" for row in qat.summary(model).quantizers)


def test_a_recurrent_cell_left_float_is_only_mentioned(tmp_path: Path) -> None:
    x = torch.randn(2, C, 4)
    model = calibrated(prepare(Cell().eval(), x), (x,))
    assert "cell" in qat.summary(model).left_float
    report = lint(qat.export(model, x, tmp_path / "m.onnx").path)
    assert report.clean, str(report)
    found = report.of_rule("float-island")
    assert found and all(f.severity is Severity.INFO and "recurrent" in f.why for f in found)
