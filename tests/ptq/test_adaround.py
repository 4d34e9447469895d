"""AdaRound: baked roundings that survive to the file, lower errors of every layer, digits in two bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import qat
from digits_networks import accuracy, batches, digits, quantized, trained
from qat.descriptor import QuantDescriptor
from qat.errors import ConfigError
from qat.ptq import RoundingConfig, adaround
from qat.ptq.rounding import _SoftWeight
from qat.quantizer import named_quantizers

FAST = RoundingConfig(steps=150)


def codes_of(layer: Any) -> Tensor:
    scale = layer._weight_quantizer.scale
    return layer.weight.detach() / (scale if scale.dim() == 0 else scale.reshape(-1, *[1] * (layer.weight.dim() - 1)))


def weighted(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if hasattr(m, "_weight_quantizer")}


@pytest.mark.parametrize("per_channel", [True, False])
def test_digits_in_two_bits(per_channel: bool) -> None:
    model = quantized(trained(), bits=2, per_channel=per_channel)
    before, originals = accuracy(model), copy.deepcopy(model)
    report = adaround(model, batches(), FAST, progress=False)
    after = accuracy(model)
    print(f"2-bit weights, per channel {per_channel}: {before:.2f} -> {after:.2f}")
    assert after > before + 20
    assert list(report.rounded) == [
        "stem", "blocks.0.depthwise", "blocks.0.pointwise", "blocks.1.depthwise", "blocks.1.pointwise", "hidden", "fc",
    ]  # fmt: skip
    assert not report.skipped
    for name, layer in weighted(model).items():
        codes, before_codes = codes_of(layer), codes_of(originals.get_submodule(name))
        assert torch.equal(codes, codes.round())
        assert torch.equal(layer._weight_quantizer(layer.weight), layer.weight)
        assert bool((codes - before_codes).abs().max() < 1), "each weight goes to one of its two neighbours"
        row = report.rounded[name]
        assert row.error_learned < row.error_nearest
        assert 0 < row.changed < 0.5


def test_same_seed_same_weights_and_the_rest_is_untouched() -> None:
    model = quantized(trained(), bits=4).train()
    before, twin, other = copy.deepcopy(model.state_dict()), copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(5)
    adaround(model, batches(2), RoundingConfig(steps=30), progress=False)
    torch.manual_seed(6)
    adaround(twin, iter(batches(2)), RoundingConfig(steps=30), progress=False)
    adaround(other, batches(2), RoundingConfig(steps=30, seed=1), progress=False)
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())
    assert not torch.equal(model.hidden.weight, other.hidden.weight)  # type: ignore[union-attr,arg-type]
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed <= {f"{name}.weight" for name in weighted(model)}
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_learned_integers_are_those_of_the_file(tmp_path: Path) -> None:
    model = trained()
    qat.prepare(model, batches()[0][:2])
    qat.calibrate(model, batches(), progress=False)
    nearest = {name: codes_of(layer).round() for name, layer in weighted(model).items()}
    report = adaround(model, batches(4), FAST, progress=False)
    assert sum(row.changed > 0 for row in report.rounded.values()) > 2
    exported = qat.export(model, (digits()[2][:4],), tmp_path / "m.onnx")
    assert exported.parity is not None
    assert exported.parity.passed
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    differing = 0
    for name, layer in weighted(model).items():
        learned = codes_of(layer).round()
        np.testing.assert_array_equal(stored[f"{name}.weight_int8"], learned.numpy().astype(np.int8))
        differing += int((learned != nearest[name]).sum())
    assert differing > 100


def test_soft_weights_start_at_the_float_weight_and_end_at_a_neighbour() -> None:
    layer: Any = nn.Linear(32, 4)
    qat.quantize_(nn.Sequential(layer), weight_desc=QuantDescriptor(num_bits=4, axis=0, narrow_range=True))
    layer._weight_quantizer.amax = layer.weight.detach().abs().amax(1) * 0.8  # some weights are clipped
    soft = _SoftWeight(layer)
    limit = (layer._weight_quantizer.amax)[:, None]
    inside = layer.weight.abs() < limit
    torch.testing.assert_close(soft.soft()[inside], layer.weight[inside], rtol=1e-4, atol=1e-5)
    assert bool((soft.soft().abs() <= limit * 1.0001).all())
    assert torch.equal(soft.nearest * soft.scale, layer._weight_quantizer(layer.weight))
    soft.logits.data.fill_(50.0)
    assert torch.equal(soft.codes(), (soft.floor + 1).clamp(-7, 7))


def test_what_is_a_whole_code_stays() -> None:
    layer: Any = nn.Linear(32, 4)
    layer.weight.data[:, ::2] = 0  # pruned
    qat.quantize_(nn.Sequential(layer), weight_desc=QuantDescriptor(num_bits=4, axis=0, narrow_range=True))
    layer._weight_quantizer.amax = layer.weight.detach().abs().amax(1)
    soft = _SoftWeight(layer)
    optimizer = torch.optim.Adam([soft.logits], lr=1.0)
    for _ in range(9):
        (soft.logits.grad,) = torch.autograd.grad(-soft.soft().sum(), soft.logits)
        optimizer.step()
    with torch.no_grad():
        soft.logits += 9
    assert not soft.codes()[:, ::2].any() and soft.codes()[:, 1::2].any()


class Odd(nn.Module):
    """A layer called twice, a weight used in a function, and one layer that AdaRound can do."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.free, self.last = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32)), nn.Linear(32, 32)
        self.unused = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.twice(self.twice(x) @ self.free)))


def test_what_cannot_be_done_is_listed() -> None:
    model = Odd().eval()
    x = torch.randn(64, 32)
    qat.prepare(model, x, keep_float_logits=False, weight_desc=QuantDescriptor(num_bits=3, axis=0, narrow_range=True))
    qat.calibrate(model, [x], progress=False)
    report = adaround(model, [x], RoundingConfig(steps=50), progress=False)
    assert list(report.rounded) == ["last"]
    assert report.skipped["twice"] == "it is called more than once in a forward, or never"
    function = next(name for name in report.skipped if name != "twice")
    assert report.skipped[function] == "its weight is used in a function, not in a layer"
    assert function in dict(named_quantizers(model))


def test_settings_are_checked() -> None:
    for wrong in ({"steps": 0}, {"lr": 0.0}, {"warm_up": 1.0}, {"regularization": -1.0}, {"batch_size": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RoundingConfig(**wrong)  # type: ignore[arg-type]
    config = RoundingConfig(steps=100, warm_up=0.2)
    assert config.beta(19) is None
    assert config.beta(20) == 20.0
    assert config.beta(60) == pytest.approx(11.0)
