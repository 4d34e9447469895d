"""Bias correction: means are those of the float model, and digits that coarse weights lose come back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import qat
from digits_networks import accuracy, batches, digits, quantized, trained
from qat.descriptor import QuantDescriptor
from qat.errors import CalibrationError
from qat.ptq import correct_biases, equalize


def channel_means(model: nn.Module, name: str, x: Tensor) -> Tensor:
    found: list[Tensor] = []

    def note(_module: nn.Module, _inputs: object, y: Tensor) -> None:
        found.append(y.transpose(0, 1).flatten(1).mean(1))  # at once: an in-place ReLU may follow

    hook = model.get_submodule(name).register_forward_hook(note)
    with torch.no_grad():
        model(x)
    hook.remove()
    return found[0]


@pytest.mark.parametrize("folded", [False, True])
def test_digits_in_two_bits(folded: bool) -> None:
    model = trained()
    if folded:
        equalize(model, batches()[0])
    quantized(model, bits=2)
    before = accuracy(model)
    report = correct_biases(model, batches(), progress=False)
    after = accuracy(model)
    print(f"2-bit weights, folded {folded}: {before:.2f} -> {after:.2f}")
    assert after > before + 10
    assert set(report.corrected) == {name for name, m in model.named_modules() if hasattr(m, "_weight_quantizer")}
    assert not report.skipped
    assert all(shift > 0 for shift in report.corrected.values())


@pytest.mark.parametrize("folded", [False, True])
def test_every_layer_has_the_float_mean_on_one_batch(folded: bool) -> None:
    x = digits()[0][:256]
    float_model = trained()
    model = trained()
    if folded:
        for one in (float_model, model):
            qat.fold_batch_norm_(one, x)
    quantized(model, bits=3)
    off = channel_means(model, "blocks.1.relu1", x)
    correct_biases(model, [x], progress=False)
    for name in ("blocks.0.bn1", "blocks.0.bn2", "blocks.1.bn1", "blocks.1.bn2", "hidden", "fc"):
        means = [channel_means(one, name, x) for one in (model, float_model)]
        torch.testing.assert_close(*means, rtol=1e-3, atol=1e-3)
    assert (off - channel_means(float_model, "blocks.1.relu1", x)).abs().max() > 0.05


def test_batches_are_averaged_and_the_model_is_left_as_it_was_otherwise() -> None:
    model = quantized(trained(), bits=3).train()
    before = copy.deepcopy(model.state_dict())
    twice = copy.deepcopy(model)
    correct_biases(model, batches(2), progress=False)
    correct_biases(twice, [*batches(2), *batches(2)], progress=False)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"bn.running_mean", "hidden.bias", "fc.bias"} | {
        f"blocks.{n}.bn{k}.running_mean" for n in (0, 1) for k in (1, 2)
    }
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, twice.state_dict()[key])
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


class Calls(nn.Module):
    """A layer on 3-D tensors called twice, and one without bias whose output nothing normalizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(torch.relu(self.first(x)))))


def test_calls_are_averaged_and_what_has_no_bias_is_listed() -> None:
    model = Calls().eval()
    float_model = copy.deepcopy(model)
    qat.quantize_(model, weight_desc=QuantDescriptor(num_bits=3, axis=0, narrow_range=True))
    x = torch.randn(16, 5, 32) + 1
    qat.calibrate(model, [x], progress=False)
    before = model.first.bias.detach().clone()
    report = correct_biases(model, [x], progress=False)
    assert list(report.corrected) == ["first"]
    assert report.skipped == {"second": "it has no bias, and no BatchNorm alone reads its output"}
    with torch.no_grad():  # by hand: the error of each call, that of the first taken out in front of the second
        wanted, bias, quantized_weight = float_model.first(x), before, model.first._weight_quantizer(model.first.weight)
        first = nn.functional.linear(model.first._input_quantizer(x), quantized_weight, bias)
        errors = [(first - wanted).mean((0, 1))]
        second = model.first._input_quantizer(torch.relu(first - errors[0]))
        second = nn.functional.linear(second, quantized_weight, bias)
        errors.append((second - float_model.first(torch.relu(wanted))).mean((0, 1)))
    torch.testing.assert_close(model.first.bias, before - torch.stack(errors).mean(0), rtol=1e-4, atol=1e-5)
    assert max(error.abs().max() for error in errors) > 0.01


def test_errors() -> None:
    with pytest.raises(CalibrationError, match="no layer has a quantized weight"):
        correct_biases(trained(), batches())
    with pytest.raises(CalibrationError, match="no calibration batches"):
        correct_biases(quantized(trained()), [])
