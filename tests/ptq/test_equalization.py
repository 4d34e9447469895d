"""Cross-layer equalization: the same function, equal channels, and digits that per-tensor weights lose otherwise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import qat
from digits_networks import accuracy, batches, quantized, trained, unbalance
from qat.errors import ConfigError
from qat.ptq import equalization, equalize
from qat.ptq.channels import channel_range, channels, multiply_channels
from qat.quantizer import named_quantizers

X = torch.randn(2, 16, 8, 8)


def test_digits_with_channels_of_ten_octaves_survive_per_tensor_weights() -> None:
    model = unbalance(trained(), octaves=10)
    float_accuracy = accuracy(model)
    broken = accuracy(quantized(copy.deepcopy(model), per_channel=False))
    report = equalize(model, batches()[0])
    assert accuracy(model) == float_accuracy > 97
    repaired = accuracy(quantized(model, per_channel=False))
    print(f"float {float_accuracy:.2f}, PTQ {broken:.2f}, equalized PTQ {repaired:.2f}")
    assert broken < 60
    assert repaired > float_accuracy - 1
    assert (("blocks.0.pointwise", "stem"), ("blocks.0.depthwise", "blocks.1.depthwise")) in report.equalized
    assert report.skipped == {"fc": "its output is an output of the model"}
    assert len(report.folded) == 5


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 12, 3),
        nn.Conv2d(8, 12, 3, groups=4),
        nn.Conv1d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 12, 3),
        nn.ConvTranspose2d(8, 12, 3, groups=4),
        nn.Linear(8, 12),
    ],
    ids=str,
)
def test_channels_of_every_kind_of_layer(layer: Any) -> None:
    dims = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)
    x = torch.randn(2, 8, *[5] * dims)
    shape = (1, -1, *[1] * dims)
    expected, weight = layer(x) - layer.bias.reshape(shape), layer.weight.detach().clone()
    into, out = torch.rand(channels(layer, "input")) + 0.5, torch.rand(channels(layer, "output")) + 0.5
    changed = multiply_channels(layer, "input", weight, into)
    layer.weight.data = multiply_channels(layer, "output", changed, out)
    y = layer(x / into.reshape(shape)) - layer.bias.reshape(shape)
    torch.testing.assert_close(y, expected * out.reshape(shape), rtol=1e-4, atol=1e-5)
    for side, size in (("input", into), ("output", out)):
        ratio = channel_range(layer, side, multiply_channels(layer, side, weight, size))  # type: ignore[arg-type]
        torch.testing.assert_close(ratio, channel_range(layer, side, weight) * size)  # type: ignore[arg-type]


def test_both_sides_take_the_same_part_of_their_ranges() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    model[0].weight.data.mul_(torch.logspace(-1, 1, 8)[:, None])
    model[0].bias.data[0] = 1e4  # so far above the others that these may grow
    equalize(model, torch.randn(64, 6))
    written, read = (channel_range(m, s, m.weight) for m, s in ((model[0], "output"), (model[2], "input")))  # type: ignore[arg-type]
    torch.testing.assert_close((written / written.max())[1:], (read / read.max())[1:], rtol=1e-2, atol=1e-3)


class Zoo(nn.Module):
    """One small network for each thing that joins, passes or stops a scale."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.c = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.grouped = nn.Conv2d(16, 32, 3, groups=4)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.fc, self.gate = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm2d(16)
        self.act = nn.PReLU(16) if kind == "prelu" else nn.LeakyReLU(0.2, inplace=True)
        self.scale = nn.Parameter(torch.rand(16, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:  # noqa: PLR0911, PLR0912
        y = self.act(self.a(x))
        match self.kind:
            case "prelu" | "leaky":
                return self.c(self.b(y).relu())
            case "residual":
                y += self.act(self.b(y))
                return self.c(y.relu_())
            case "gate":
                gate = torch.sigmoid(self.gate(self.fc(y.mean((2, 3))).relu()))
                return self.c(y * gate[:, :, None, None])
            case "parameter":
                return self.c(y * self.scale * 2)
            case "constant":
                return self.c(y + 1)
            case "transposed":
                return self.c(torch.relu(self.up(torch.relu(self.grouped(nn.functional.pad(y, (1, 1)))))))
            case "twice":
                return self.c(self.b(torch.relu(self.b(y))))
            case "permuted":
                y = nn.functional.avg_pool2d(y, 2).flatten(2)  # (N, 16, 16)
                return self.c(y.transpose(1, 2).unflatten(2, (4, 4)))
            case "sliced":
                return self.c(torch.cat([y[:, 8:], y[:, :8]], 1))
            case "norm":
                return self.c(self.norm(y) + y)
            case "tied":
                return nn.functional.conv2d(torch.relu(self.b(y)), self.b.weight)
            case "pooled":
                y = nn.functional.max_pool2d(nn.functional.interpolate(y, scale_factor=2, mode="bilinear"), 2)
                return self.fc(nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))
            case "branching":
                return self.c(y) if y.mean() > -100 else self.b(y)
            case _:
                return self.c(y.square())


KINDS = {
    "prelu": 2, "leaky": 2, "residual": 1, "gate": 2, "parameter": 1, "constant": 0, "transposed": 3, "twice": 0,
    "permuted": 0, "sliced": 0, "norm": 0, "tied": 0, "pooled": 1, "branching": 0, "square": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_function_is_kept_whatever_stands_between(kind: str) -> None:
    model = Zoo(kind).eval()
    model.a.weight.data.mul_(torch.logspace(-2, 2, 16)[:, None, None, None])
    expected = model(X)
    report = equalize(model, X)
    torch.testing.assert_close(model(X), expected, rtol=1e-3, atol=1e-4 * float(expected.detach().abs().max()))
    assert len(report.equalized) == KINDS[kind], report
    if not report.equalized:
        assert "a" in report.skipped


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "shufflenet_v2_x0_5", "resnet18"])
def test_torchvision_networks(name: str) -> None:
    model = torchvision.models.get_model(name, num_classes=10).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.1, 2.0)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    report = equalize(model, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3 * float(expected.detach().abs().max()))
    assert len(report.equalized) > 10


def test_relu6_stops_a_scale_unless_it_is_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU6(), nn.Conv2d(16, 16, 1)).eval()
    twin = copy.deepcopy(model)
    report = equalize(model, X)
    assert report.equalized == ()
    assert report.skipped["0"] == "a scale per channel does not pass through 1 (ReLU6)"
    report = equalize(twin, X, replace_relu6=True)
    assert report.replaced == ("1",)
    assert report.equalized == ((("0",), ("2",)),)
    assert type(twin[1]) is nn.ReLU


class Hidden(nn.Module):
    """Reads a layer's weight in a way that no trace sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.alias = [self.a.weight.detach()]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.alias[0].sum()


def test_a_function_that_would_change_is_refused_and_put_back() -> None:
    model = Hidden().eval()
    model.a.weight.data.mul_(torch.logspace(-2, 2, 8)[:, None])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="computes something else when its channels are scaled"):
        equalize(model, torch.randn(4, 8))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_prepared_models_before_calibration_only() -> None:
    model = unbalance(trained())
    expected = model(batches()[0])
    qat.prepare(model, batches()[0])
    report = equalize(model, batches()[0])
    assert len(report.equalized) == 5
    qat.calibrate(model, batches(), progress=False)
    quantizers = [quantizer for _, quantizer in named_quantizers(model)]
    with qat.modes.passing_through(quantizers):
        torch.testing.assert_close(model(batches()[0]), expected, rtol=1e-3, atol=1e-2)
    with pytest.raises(ConfigError, match="Equalize first"):
        equalize(model, batches()[0])


def test_dead_channels_and_high_biases_do_not_blow_up_activations() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[0].bias[:4] = 1.0
        model[0].weight[4:8] *= 1e-7  # as a folded BatchNorm leaves it: almost constant channels
        model[0].bias[4:8] = 2.0
        model[2].weight[:, 8:10] = 0
    x = torch.randn(64, 8)
    before = model[:2](x).max()
    equalize(model, x)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert model[:2](x).max() <= before * 1.001


def test_outputs_are_compared_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its rounding, multiplied by dozens of layers, looked like another function."""
    seen: list[tuple[bool, bool]] = []

    def flags() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    def measure(*args: Any) -> Any:
        seen.append(flags())
        return real(*args)

    real = equalization._measure
    monkeypatch.setattr(equalization, "_measure", measure)
    usual = flags()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        equalize(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), torch.randn(4, 6))
        assert seen == [(False, False)] * 2
        assert flags() == (True, True)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = usual
