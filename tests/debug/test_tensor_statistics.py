"""Histograms, clipped shares and noise by tensor."""

import json

import pytest
import torch
from torch import nn

import qat
from qat.debug import TensorStatistics, tensor_statistics
from qat.errors import ConfigError


def test_counts_clipping_and_noise_are_those_of_the_tensors() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4)), torch.randn(1000, 8)
    qat.quantize_(model)
    qat.calibrate(model, [x], progress=False)
    model[0]._input_quantizer.amax = 1.0
    model[0]._weight_quantizer.amax = model[0].weight.detach().abs().amax(1) / torch.tensor([1, 1, 1, 2.0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    activation, weight = tensor_statistics(model, [x[:500], x[500:]], progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())

    assert (activation.name, activation.weight, activation.channels) == ("0._input_quantizer", False, 1)
    assert activation.clipped == pytest.approx(float(((x >= 127.5 / 127) | (x <= -128.5 / 127)).double().mean()))
    assert activation.amax == activation.clip == 1.0
    assert activation.largest == float(x.abs().max())
    assert sum(activation.counts) == x.numel()
    edge = 20 * activation.width
    assert sum(activation.counts[:20]) == int((x.abs() < edge).sum())
    y = model[0]._input_quantizer(x)
    noise = 10 * torch.log10(x.double().square().sum() / (y - x).double().square().sum())
    assert activation.sqnr_db == pytest.approx(float(noise), abs=1e-6)

    assert (weight.name, weight.weight, weight.channels) == ("0._weight_quantizer", True, 4)
    assert (weight.clip, weight.largest) == (1.0, 2.0), "per channel, values are counted relative to amax"
    assert sum(weight.counts) == 2 * 4 * 8
    assert weight.clipped == pytest.approx(
        float((model[0].weight[3].abs() * 127 / weight_amax(model) >= 127.5).sum()) / 32
    )
    assert TensorStatistics.from_dict(json.loads(json.dumps(weight.to_dict()))) == weight


def weight_amax(model: nn.Module) -> torch.Tensor:
    amax: torch.Tensor = model[0]._weight_quantizer.amax[3]
    return amax


def test_only_what_quantizes_is_looked_at() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    qat.quantize_(model)
    qat.calibrate(model, [torch.randn(4, 8)], progress=False)
    for child in model[1].children():
        child.set_state(qat.QuantizerState.PASSTHROUGH, "left float")
    found = tensor_statistics(model, [torch.randn(4, 8)], progress=False)
    assert [row.name for row in found] == ["0._input_quantizer", "0._weight_quantizer"]
    with pytest.raises(ConfigError, match="there are no batches"):
        tensor_statistics(model, [], progress=False)
