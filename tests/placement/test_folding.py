"""Folding BatchNorm: the same function, and after calibration the same weight codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placement_networks as net
import qat
from placement_validator import calibrated
from qat.placement import fold_batch_norm_, prepare


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.eval()


class Layers(nn.Module):
    """Every layer that can take up a BatchNorm, and one whose output something else reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1 = nn.Conv2d(16, 32, 3, groups=2), nn.BatchNorm2d(32)
        self.up, self.bn2 = nn.ConvTranspose2d(32, 16, 2, 2, groups=2, bias=False), nn.BatchNorm2d(16)
        self.both, self.bn3 = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.fc, self.bn4 = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(torch.relu(self.bn2(self.up(torch.relu(self.bn1(self.conv(x)))))))
        x = self.bn3(x) + x
        return self.bn4(self.fc(x.mean((2, 3))))


def test_float_model_computes_the_same() -> None:
    x = net.image()
    model = with_statistics(Layers())
    expected = model(x)
    assert fold_batch_norm_(model, x) == ("conv", "up", "fc")
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert isinstance(model.bn1, nn.Identity)
    assert isinstance(model.bn3, nn.BatchNorm2d)


def codes(model: nn.Module) -> dict[str, Tensor]:
    """INT8 codes of each weight."""
    found = {}
    for name, module in model.named_modules():
        quantizer: Any = getattr(module, "_weight_quantizer", None)
        if quantizer is not None:
            shape = [-1 if quantizer.descriptor.axis == d else 1 for d in range(module.weight.dim())]
            scale = quantizer.scale if quantizer.descriptor.axis is None else quantizer.scale.reshape(shape)
            found[name] = (module.weight.detach() / scale).round().clamp(-127, 127)
    return found


@pytest.mark.parametrize("build", [net.Basic, net.Bottleneck, net.Inverted, net.Inception])
def test_folding_after_calibration_keeps_every_code_but_for_rounding(build: Any) -> None:
    x = net.image(64 if build is net.Bottleneck else net.C)
    model = calibrated(prepare(with_statistics(build()), x), (x,))
    before, expected = codes(model), model(x)
    folded = fold_batch_norm_(model, x)
    assert folded
    after = codes(model)
    for name, old in before.items():
        norm_sign = torch.where((old * after[name]).flatten(1).sum(1) < 0, -1.0, 1.0)
        new = after[name] * norm_sign.reshape(-1, *[1] * (old.dim() - 1))
        assert int((new - old).abs().max()) <= 1
        assert float((new != old).float().mean()) < 1e-3
    step = max(float(q.scale.max()) for name, q in qat.named_quantizers(model) if "weight" not in name)
    assert float((model(x) - expected).abs().max().detach()) < 3 * step


def test_folded_before_prepare_is_calibrated_as_usual() -> None:
    x = net.image()
    model = with_statistics(net.Basic())
    fold_batch_norm_(model, x)
    calibrated(prepare(model, x), (x,))
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    largest = model.conv1[0].weight.detach().abs().amax((1, 2, 3))
    assert torch.equal(model.conv1[0]._weight_quantizer.amax, largest)
