"""Patterns that the sweep over torchvision and timm met (scripts/sweep_models.py): their edges, and a clean file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placement_networks as net
import qat
from placement_validator import calibrated, quantized_edges
from qat.onnx.lint import assert_clean
from qat.placement import prepare

C = net.C


class ScaledInPlace(nn.Module):
    """SE-ResNet's downsampling block: the excited branch, in no layer's kernel any more, takes the sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shortcut, self.after = net.conv(C, 32), net.conv(C, 32, 1), net.conv(32, 32)
        self.fc = nn.Conv2d(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv(x)
        x = x * torch.sigmoid(self.fc(x.mean((2, 3), keepdim=True)))
        x += self.shortcut(shortcut)
        return self.after(F.relu(x))


class SumInPlace(nn.Module):
    """MobileOne's branches: a sum that begins with the number 0 and grows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(net.conv(C, C) for _ in range(3))
        self.after = net.conv(C, C)

    def forward(self, x: Tensor) -> Tensor:
        out: Any = 0
        for branch in self.branches:
            out += branch(x)
        return self.after(F.relu(out))


class GlobalContext(nn.Module):
    """GCNet: a softmax pools the map to 1x1, two convolutions on that, added to the whole map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attend = net.conv(C, 64), nn.Conv2d(64, 1, 1)
        self.fc1, self.fc2, self.after = nn.Conv2d(64, 32, 1), nn.Conv2d(32, 64, 1), net.conv(64, C)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        weights = self.attend(x).flatten(2).softmax(-1).unsqueeze(3)
        context = (x.flatten(2).unsqueeze(1) @ weights).view(x.size(0), -1, 1, 1)
        return self.after(x + self.fc2(F.relu(self.fc1(context))))


class FloatLayerInAdd(nn.Module):
    """RepGhost: a small convolution, left float, added to a sum: no INT8 kernel takes that add."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.summed = summed
        self.first, self.depthwise, self.after = net.conv(C, C), net.conv(C, C, groups=C), net.conv(C, C)
        self.reduce, self.small = net.conv(C, 8), net.conv(8, C)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        y = self.depthwise(x)
        y = y + x if self.summed else y
        return self.after(F.relu(y + self.small(F.relu(self.reduce(x)))))


class RotaryAttention(nn.Module):
    """EVA-02: queries and keys are joined from a part that is rotated and one that is not, and keep their type."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 20)

    def turn(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], x[:, 1:] * 0.5 + x[:, 1:].flip(-1) * 0.25], 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.turn(q).type_as(v), self.turn(k).type_as(v)
        return self.head(F.gelu(self.proj(F.scaled_dot_product_attention(q, k, v))))


class SmallDepthwise(nn.Module):
    """InceptionNeXt and GhostNet: a depthwise convolution of few channels, float between INT8 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise, self.last = net.conv(C, 24), net.conv(8, 8, groups=8), net.conv(24, C)

    def forward(self, x: Tensor) -> Tensor:
        kept, x = F.relu(self.first(x)).split((16, 8), 1)
        return self.last(torch.cat((kept, self.depthwise(x)), 1))


class Blurred(nn.Module):
    """BlurPool: a padding that repeats values is a kernel of its own, so a quantizer behind it breaks nothing up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = net.conv(C, C), net.conv(C, C)
        self.register_buffer("blur", torch.tensor([1.0, 2.0, 1.0]).outer(torch.tensor([1.0, 2.0, 1.0])) / 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(F.relu(self.first(x)), [1] * 4, mode="reflect")
        return self.last(F.conv2d(x, self.blur.expand(C, 1, 3, 3), stride=2, groups=C))


FLOAT_BRANCH = {"reduce.0", "small.0"}
POOL: dict[str, tuple[Any, Any, dict[str, str], set[str]]] = {
    "scaled_in_place": (
        ScaledInPlace,
        net.image(),
        {
            "conv.0._input_quantizer": "conv2d conv2d",
            "_add_quantizer": "add",
            "after.0._input_quantizer": "conv2d",
        },
        {"global_pool", "fc", "mul"},
    ),
    "sum_in_place": (
        SumInPlace,
        net.image(),
        {
            "branches.0.0._input_quantizer": "conv2d conv2d conv2d",
            "_add_quantizers.1": "add",
            "_add_quantizers.2": "add",
            "after.0._input_quantizer": "conv2d",
        },
        set(),
    ),
    "global_context": (
        GlobalContext,
        net.image(),
        {"conv.0._input_quantizer": "conv2d", "after.0._input_quantizer": "conv2d"},
        {"attend", "matmul", "fc1", "fc2"},
    ),
    "float_layer_and_sum": (
        lambda: FloatLayerInAdd(summed=True),
        net.image(),
        {
            "first.0._input_quantizer": "conv2d",
            "depthwise.0._input_quantizer": "add conv2d",
            "after.0._input_quantizer": "conv2d",
        },
        {"add_2", *FLOAT_BRANCH},
    ),
    "float_and_int8_layer": (
        lambda: FloatLayerInAdd(summed=False),
        net.image(),
        {
            "first.0._input_quantizer": "conv2d",
            "depthwise.0._input_quantizer": "conv2d",
            "_add_quantizer": "add",
            "after.0._input_quantizer": "conv2d",
        },
        FLOAT_BRANCH,
    ),
    "rotary_attention": (
        RotaryAttention,
        torch.randn(2, 20, 32),
        {
            "qkv._input_quantizer": "linear",
            "_attention._query_quantizer": "matmul",
            "_attention._key_quantizer": "transpose",
            "_attention._softmax_quantizer": "matmul",
            "_attention._value_quantizer": "matmul",
            "proj._input_quantizer": "linear",
        },
        {"add", "head"},
    ),
    "small_depthwise": (
        SmallDepthwise,
        net.image(),
        {"first.0._input_quantizer": "conv2d", "last.0._input_quantizer": "conv2d"},
        {"depthwise.0"},
    ),
    "blurred": (
        Blurred,
        net.image(),
        {"first.0._input_quantizer": "conv2d", "_input_quantizer": "conv2d", "last.0._input_quantizer": "conv2d"},
        set(),
    ),
}


@pytest.mark.parametrize("name", POOL)
def test_edges_and_a_clean_file(name: str, tmp_path: Path) -> None:
    build, x, edges, left_float = POOL[name]
    torch.manual_seed(0)
    model = build().eval()
    before = model(x)
    calibrated(prepare(model, x), (x,))
    assert {key: " ".join(users) for key, users in quantized_edges(model, (x,)).items()} == edges
    assert set(qat.summary(model).left_float) == left_float
    report = qat.export(model, x, tmp_path / "model.onnx")
    assert report.parity is not None and report.parity.passed
    assert_clean(report.path)
    qat.set_quantizer_state(model, qat.QuantizerState.PASSTHROUGH)
    assert torch.equal(model(x), before)


def test_float_projection_behind_int8_attention(tmp_path: Path) -> None:
    """The context keeps its quantizer where the layer that reads it is left out."""
    x = torch.randn(2, 20, 32)
    model = calibrated(prepare(RotaryAttention().eval(), x, exclude="proj"), (x,))
    assert quantized_edges(model, (x,))["_attention_result_quantizer"] == ["linear"]
    assert_clean(qat.export(model, x, tmp_path / "model.onnx").path)
