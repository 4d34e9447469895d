from typing import Any

import pytest
import torch
from torch import nn

from qat.descriptor import MIN_SCALE
from qat.errors import ConfigError
from qat.quantizer import AmaxMode, TensorQuantizer
from qat.training import apply_amax_mode, build_optimizer
from qat.training.amax import PositiveAmax
from qat.training.optim import parameter_groups, set_learning_rate
from tiny_training import TinyNet


def _names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    return {name for name, p in model.named_parameters() if any(p is q for q in group["params"])}


def test_groups_of_a_quantized_model() -> None:
    model = TinyNet(norm=True)
    apply_amax_mode(model, "learned")
    decay, no_decay, amax = parameter_groups(model, 0.1, amax_lr_factor=0.5)
    assert _names(model, decay) == {"first.weight", "head.weight"}
    assert _names(model, no_decay) == {"first.bias", "head.bias", "norm.weight", "norm.bias"}
    assert _names(model, amax) == {"input_quantizer._amax", "weight_quantizer._amax"}
    assert [g["weight_decay"] for g in (decay, no_decay, amax)] == [0.1, 0.0, 0.0]
    assert [g["lr_factor"] for g in (decay, no_decay, amax)] == [1.0, 1.0, 0.5]


def test_two_dimensional_norm_and_lstm_bias_take_no_decay_and_frozen_parameters_are_left_out() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm((2, 3)), "lstm": nn.LSTM(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    decay, no_decay = parameter_groups(model, 0.1)
    assert _names(model, decay) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}
    assert _names(model, no_decay) == {"norm.weight", "norm.bias", "lstm.bias_ih_l0", "lstm.bias_hh_l0"}


def test_shared_parameter_is_given_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert len(parameter_groups(model, 0.1)[0]["params"]) == 1


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_decay_moves_weights_but_not_biases_norms_or_amax(name: str) -> None:
    model = TinyNet(norm=True)
    apply_amax_mode(model, "learned")
    optimizer = build_optimizer(model, name, lr=0.1, weight_decay=0.5)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    assert moved == {"first.weight", "head.weight"}


def test_learning_rate_of_amax_is_its_own() -> None:
    model = TinyNet()
    apply_amax_mode(model, "learned")
    optimizer = build_optimizer(model, lr=0.2, amax_lr_factor=0.1)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.2, 0.2, 0.02])
    set_learning_rate(optimizer, 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.5, 0.5, 0.05])


def test_errors() -> None:
    with pytest.raises(ConfigError, match="optimizer='adam'"):
        build_optimizer(nn.Linear(2, 2), "adam")
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False))


def test_positive_amax() -> None:
    quantizer = TensorQuantizer()
    quantizer.amax = 1.0
    quantizer.set_amax_mode(AmaxMode.LEARNED)
    guard = PositiveAmax([quantizer, TensorQuantizer()])
    quantizer._amax.data.fill_(-0.5)
    guard.apply()
    assert quantizer._amax.item() == 0.5
    quantizer._amax.data.zero_()
    guard.apply()
    assert quantizer._amax.item() == pytest.approx(127 * MIN_SCALE)
