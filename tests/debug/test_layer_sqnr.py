"""Noise by layer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.debug import layer_sqnr
from qat.errors import ConfigError
from qat.modes import passing_through


class Net(nn.Module):
    """Changes its input in place, calls a layer twice, and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu_(self.first(x))
        y = self.twice(F.relu(self.twice(y))) + y
        return self.last(y)


def calibrated() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 16)
    qat.quantize_(model)
    qat.calibrate(model, [x], progress=False)
    return model, x


def decibel(reference: Tensor, other: Tensor) -> float:
    return 10 * math.log10(float(reference.double().square().sum() / (other.double() - reference).square().sum()))


def test_own_and_total_noise_are_those_of_the_tensors() -> None:
    model, x = calibrated()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = {row.name: row for row in layer_sqnr(model, [x], progress=False)}
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert list(rows) == ["first", "twice", "last", ""]
    with torch.no_grad():
        quantized = model(x)
        first = model.first(x)
        with passing_through([q for _, q in qat.named_quantizers(model)]):
            reference, float_first = model(x), model.first(x)
    assert rows["first"].own_db == pytest.approx(decibel(float_first, first), abs=1e-6)
    assert rows["first"].total_db == pytest.approx(rows["first"].own_db, abs=1e-6), "nothing comes before it"
    assert rows[""].total_db == pytest.approx(decibel(reference, quantized), abs=1e-6)
    assert rows[""].own_db is None
    assert rows["last"].own_db is not None
    assert rows["last"].total_db < rows["last"].own_db, "it has the noise of the layers before it too"


def test_the_ruined_layer_has_the_least_own_ratio() -> None:
    model, x = calibrated()
    model.twice._input_quantizer.amax = 50 * model.twice._input_quantizer.amax
    rows = {row.name: row for row in layer_sqnr(model, [x], progress=False)}
    own = {name: row.own_db for name, row in rows.items() if row.own_db is not None}
    assert min(own, key=lambda name: own[name]) == "twice"
    assert own["first"] > own["twice"] + 20


class InPlace(nn.Module):
    """A block that overwrites what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        identity = x * 2
        return self.layer(x.mul_(0.5)) + identity


def test_a_block_that_changes_its_input_in_place() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Tanh(), InPlace(), nn.Linear(16, 16)), torch.randn(8, 16)
    qat.prepare(model, x, keep_float_logits=False)
    qat.calibrate(model, [x], progress=False)
    rows = {row.name: row for row in layer_sqnr(model, [x], progress=False)}
    assert rows["1"].own_db is not None, "the block's add has a quantizer"
    assert rows["1"].own_db > 30, "run again, it must be given the input it was given at first"


def test_against_another_float_model() -> None:
    model, x = calibrated()
    other = Net()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if "quantizer" not in k})
    same = layer_sqnr(model, [x], reference=other, progress=False)
    assert [row.total_db for row in same] == pytest.approx([r.total_db for r in layer_sqnr(model, [x], progress=False)])
    with torch.no_grad():
        other.last.weight.mul_(1.1)
    worse = layer_sqnr(model, [x], reference=other, progress=False)
    assert worse[0].total_db == same[0].total_db
    assert worse[-1].total_db < 25


def test_what_cannot_be_compared() -> None:
    model, _ = calibrated()
    with pytest.raises(ConfigError, match="there are no batches"):
        layer_sqnr(model, [], progress=False)
    qat.set_quantizer_state(model, qat.QuantizerState.PASSTHROUGH)
    with pytest.raises(ConfigError, match="no quantizer of Net quantizes"):
        layer_sqnr(model, [torch.ones(1, 16)], progress=False)
