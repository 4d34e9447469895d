"""What a prepared model can do: train, copy, pickle, compile, load; who decides what is quantized."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import placement_networks as net
import qat
from placement_validator import calibrated, quantized_edges
from qat.errors import ConfigError
from qat.placement import DEFAULT_RULES, QUANTIZE, Rule, leave_float, prepare, replaced, without

X = net.image()


def ready(model: nn.Module, x: Any = X) -> nn.Module:
    return calibrated(prepare(model, x), x if isinstance(x, tuple) else (x,))


@pytest.mark.parametrize("build", [net.Downsample, net.DenseNet, lambda: net.ViTBlock(True), net.Functional])
def test_copy_pickle_and_state_dict(build: Any) -> None:
    x = X if build is not None and not isinstance(build(), net.ViTBlock) else torch.randn(2, 20, 32)
    model = ready(build(), x)
    expected = model(x)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    fresh = prepare(build(), x)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(x), expected)
    shared = [(p, q) for p, q in model.named_modules(remove_duplicate=False) if isinstance(q, qat.TensorQuantizer)]
    for path, quantizer in shared:
        same = [other for other, candidate in shared if candidate is quantizer]
        assert all(twin.get_submodule(path) is twin.get_submodule(other) for other in same)


def test_training_step_reaches_every_parameter_and_moves_batch_norm() -> None:
    model = ready(net.Basic()).train()
    before = model.conv1[1].running_mean.clone()
    model(X).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    assert not torch.equal(before, model.conv1[1].running_mean)


def test_a_sum_in_place_does_not_change_what_another_reader_keeps() -> None:
    model = ready(net.SumInPlace()).train()
    assert [row.readers for row in qat.summary(model).quantizers if row.name == "b._input_quantizer"] == [("b", "add")]
    model(X).square().mean().backward()  # torch raises where a tensor that was kept has been changed
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_functional_dropout_still_follows_the_training_mode() -> None:
    """A trace of the whole model would have frozen `self.training` in `dropout_p=0.1 if self.training else 0.0`."""
    x = torch.randn(2, 20, 32)
    model = ready(net.ViTBlock(fused=True), x)
    model.drop.p = 0.0
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_compiles_in_one_graph() -> None:
    model = ready(net.Downsample())
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), model(X))


def test_shared_quantizer_is_one_object_with_both_keys() -> None:
    model = ready(net.Downsample())
    assert model.conv1[0]._input_quantizer is model.shortcut[0]._input_quantizer
    assert {"conv1.0._input_quantizer._amax", "shortcut.0._input_quantizer._amax"} <= set(model.state_dict())


def test_summary_names_tensor_sharers_and_reasons() -> None:
    model = ready(net.SqueezeExcite())
    values = json.loads(json.dumps(qat.summary(model).to_dict()))
    row = next(r for r in values["quantizers"] if r["name"] == "conv.0._input_quantizer")
    assert row["tensors"] == ["input 0"]
    assert row["readers"] == ["conv.0", "add"]
    assert row["shared_by"] == ["conv.0._input_quantizer", "_add_quantizer"]
    weight = next(r for r in values["quantizers"] if r["name"] == "conv.0._weight_quantizer")
    assert weight["tensors"] == ["weight of conv.0"]
    assert "squeeze-and-excitation" in values["left_float"]["fc1"]
    table = str(qat.summary(model))
    assert "shared by conv.0, add" in table
    assert "squeeze-and-excitation" in table


def test_rules_by_name_glob_and_type() -> None:
    """The first rule with an opinion decides, so a user's rule goes in front."""
    small = Rule("small too", QUANTIZE, ("conv",), "grouped")
    assert "grouped" not in qat.summary(prepare(net.Separable(), X, rules=(small, *DEFAULT_RULES))).left_float
    mine = Rule("depthwise stays", leave_float("mine"), layers=lambda _, m: getattr(m, "groups", 1) == net.C)
    model = prepare(net.Separable(), X, rules=(mine, *DEFAULT_RULES))
    assert qat.summary(model).left_float["depthwise.0"] == "mine"
    by_type = Rule("linear", leave_float("by type"), layers=nn.Linear)
    model = prepare(net.ViTBlock(True), torch.randn(2, 20, 32), rules=(by_type, *DEFAULT_RULES))
    assert [n for n, r in qat.summary(model).left_float.items() if r == "by type"] == ["qkv", "proj", "fc1", "fc2"]


def test_rules_are_removed_and_replaced_by_name() -> None:
    model = prepare(net.Separable(), X, rules=without(DEFAULT_RULES, "grouped"))
    assert hasattr(model.grouped, "_input_quantizer")
    rule = Rule("residual add", leave_float("no adds"), ("add",))
    model = prepare(net.Basic(), X, rules=replaced(DEFAULT_RULES, rule))
    assert qat.summary(model).left_float == {"add": "no adds"}
    with pytest.raises(ConfigError, match=r"no rule is named 'residual ad'. Did you mean 'residual add'"):
        without(DEFAULT_RULES, "residual ad")


def test_user_rule_quantizes_another_operation() -> None:
    rule = Rule("gate in INT8", QUANTIZE, ("mul",))
    model = prepare(net.TwoInputs(), (X, X), rules=(rule, *DEFAULT_RULES))
    edges = quantized_edges(calibrated(model, (X, X)), (X, X))
    assert edges["_mul_quantizer"] == ["mul"]
    assert edges["_mul_quantizer_2"] == ["mul"]


def test_user_rule_quantizes_an_lstm() -> None:
    x = torch.randn(2, 5, net.C)
    model = prepare(net.Recurrent(), x, rules=(Rule("lstm", QUANTIZE, ("recurrent",)), *DEFAULT_RULES))
    calibrated(model, (x,))
    assert model.lstm._hidden_l0_quantizer.calibrated


def test_include_exclude_and_logits() -> None:
    model = prepare(net.Basic(), X, include="conv1.*")
    assert qat.summary(model).left_float["conv2.0"] == "not selected"
    model = prepare(net.Basic(), X, exclude=["add", "conv2.0"])
    assert qat.summary(model).left_float == {"add": "excluded by 'add'", "conv2.0": "excluded by 'conv2.0'"}
    assert not hasattr(prepare(net.UNet(), X, rules=without(DEFAULT_RULES, "small channels")).head, "_input_quantizer")
    model = prepare(net.UNet(), X, rules=without(DEFAULT_RULES, "small channels"), keep_float_logits=False)
    assert hasattr(model.head, "_input_quantizer")
    with pytest.raises(ConfigError, match=r"'conv3' matches nothing in Basic. Did you mean"):
        prepare(net.Basic(), X, exclude="conv3")


def test_descriptors_reach_shared_functional_and_transposed_places() -> None:
    activation, weight = qat.QuantDescriptor(num_bits=4), qat.QuantDescriptor(num_bits=4, axis=0, narrow_range=True)
    model = prepare(net.UNet(), X, input_desc=activation, weight_desc=weight)
    assert model.up._weight_quantizer.descriptor.axis is None
    model = prepare(net.Functional(), X, input_desc=activation, weight_desc=weight)
    assert model._input_quantizer.descriptor == activation
    assert model._weight_quantizer.descriptor == weight
    assert model._matmul_other_quantizer.descriptor.axis == 1


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="has quantizers already"):
        prepare(prepare(net.Basic(), X), X)
    with pytest.raises(ConfigError, match="Basic does not run on the example inputs"):
        prepare(net.Basic(), torch.randn(2, 3))
    with pytest.raises(
        ConfigError,
        match=r"Sequential was quantized. Weighted operations left float: 1 because a convolution",
    ):
        prepare(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 8, 8))


def test_softmax_scale_is_fixed_and_attention_is_all_or_nothing() -> None:
    x = torch.randn(2, 20, 32)
    model = ready(net.ViTBlock(fused=False), x)
    assert model._matmul_input_quantizer_2.scale.item() == pytest.approx(1 / 127)
    for length, heads, reason in ((600, 2, "a sequence of 600 tokens"), (20, 4, "of width 8")):
        for fused in (True, False):
            x = torch.randn(1, length, 32)
            long = prepare(net.ViTBlock(fused, heads), x)
            assert not [n for n, _ in qat.named_quantizers(long) if "matmul" in n or "attention" in n]
            assert any(reason in r for r in qat.summary(long).left_float.values())
    model = prepare(net.ViTBlock(fused=False), torch.randn(2, 20, 32), exclude="matmul_2")
    assert not [n for n, _ in qat.named_quantizers(model) if "matmul" in n]
