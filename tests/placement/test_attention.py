"""nn.MultiheadAttention and what is built on it: no weight is read past its quantizer."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from placement_validator import calibrated
from qat.placement import prepare
from qat.placement.attention import QuantAttention, QuantMultiheadAttention


class Attention(nn.Module):
    def __init__(self, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(32, 2, **options)

    def forward(self, x: Tensor, y: Tensor | None = None, **options: Any) -> Any:
        other = x if y is None else y
        return self.attention(x, other, other, **options)


X, Y = torch.randn(3, 20, 32), torch.randn(3, 24, 32)
PADDING = torch.zeros(3, 20, dtype=torch.bool).index_fill(1, torch.tensor([18, 19]), True)
CAUSAL = torch.ones(20, 20, dtype=torch.bool).triu(1)


def barely_quantized(model: nn.Module) -> nn.Module:
    """Quantizing, but so finely that only a wrong formula shows."""
    fine: Any = lambda x: x.clone()  # noqa: E731
    for _, quantizer in qat.named_quantizers(model):
        quantizer.amax = 1.0
        quantizer.forward = fine
    return model


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": True}])
@pytest.mark.parametrize(
    "call", [{"need_weights": False}, {}, {"average_attn_weights": False}, {"key_padding_mask": PADDING}]
)
def test_written_out_attention_is_the_same_function(options: dict[str, Any], call: dict[str, Any]) -> None:
    model = Attention(**options).eval()
    x = X if options.get("batch_first") else X.transpose(0, 1)
    expected = model(x, **call)
    prepare(model, x)
    assert isinstance(model.attention, QuantMultiheadAttention)
    found = barely_quantized(model)(x, **call)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-5)


def test_masks_cross_attention_and_other_widths() -> None:
    model = Attention(batch_first=True, kdim=24, vdim=24).eval()
    y = torch.randn(3, 24, 24)
    cases = [(X, y, {}), (X[0], y[0], {})]
    expected = [model(x, other, **call)[0] for x, other, call in cases]
    prepare(model, (X, y))
    assert hasattr(model.attention, "_q_proj_weight_quantizer")
    barely_quantized(model)
    for (x, other, call), reference in zip(cases, expected, strict=True):
        assert torch.allclose(model(x, other, **call)[0], reference, atol=1e-5)
    model = Attention(batch_first=True).eval()
    masks = [CAUSAL, CAUSAL.float() * -9.0, CAUSAL.expand(6, 20, 20)]
    expected = [model(X, attn_mask=mask)[0] for mask in masks]
    prepare(model, X)
    barely_quantized(model)
    for mask, reference in zip(masks, expected, strict=True):
        assert torch.allclose(model(X, attn_mask=mask)[0], reference, atol=1e-5)


def test_every_quantizer_of_self_attention_is_reached_and_matters() -> None:
    """Kind: layer never seen in calibration (Model-Optimizer#149)."""
    model = Attention(batch_first=True)
    keys = set(model.state_dict())
    calibrated(prepare(model, X), (X,))
    assert keys <= set(model.state_dict())
    names = [name.removeprefix("attention.") for name, _ in qat.named_quantizers(model)]
    assert names == [
        "_input_quantizer",
        "_out_proj_input_quantizer",
        "_in_proj_weight_quantizer",
        "_out_proj_weight_quantizer",
        "_attention._query_quantizer",
        "_attention._key_quantizer",
        "_attention._softmax_quantizer",
        "_attention._value_quantizer",
    ]
    with torch.no_grad():
        before = model(X)[0]
        for _, quantizer in qat.named_quantizers(model):
            amax = quantizer.amax.clone()
            quantizer.amax = amax / 50
            assert not torch.equal(model(X)[0], before)
            quantizer.amax = amax
    assert torch.equal(pickle.loads(pickle.dumps(model))(X)[0], before)
    assert torch.equal(copy.deepcopy(model)(X)[0], before)
    model.train()(X)[0].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_long_sequences_keep_float_products_between_int8_projections() -> None:
    x = torch.randn(1, 600, 32)
    model = calibrated(prepare(Attention(batch_first=True), x), (x,))
    states = {name: quantizer.state for name, quantizer in qat.named_quantizers(model)}
    passing = {name for name, state in states.items() if state is qat.QuantizerState.PASSTHROUGH}
    assert passing == {n for n in states if "_attention._" in n}
    assert "600 tokens" in model.attention._attention._key_quantizer.reason
    expected = model(x)[0]
    assert torch.allclose(model(x, need_weights=False)[0], expected, atol=1e-5)


def test_unsupported_attention_stays_float_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model.add_module("last", Attention(batch_first=True, add_zero_attn=True))
    prepare(model, X)
    assert "add_zero_attn" in qat.summary(model).left_float["last.attention"]


def test_transformer_encoder_layer_uses_its_quantized_parts_without_gradients() -> None:
    """torch's fused path for evaluation would read the weights of linear1 past its quantizers."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    with torch.no_grad():
        expected = layer(X)
        calibrated(prepare(layer, X), (X,))
        assert layer._add_quantizer is layer.self_attn._input_quantizer
        assert layer._add_quantizer_2 is layer.linear1._input_quantizer
        quantized = layer(X)
        assert not torch.equal(quantized, expected)
        assert torch.allclose(quantized, expected, atol=0.2)
        layer.linear1._weight_quantizer.amax = layer.linear1._weight_quantizer.amax / 50
        assert not torch.equal(layer(X), quantized)


@pytest.mark.parametrize("call", [{}, {"is_causal": True}, {"scale": 0.5}, {"attn_mask": CAUSAL[:20].logical_not()}])
def test_scaled_dot_product_attention_written_out(call: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 2, 4, 20, 16).unbind(0)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **call)
    module = barely_quantized(QuantAttention())
    assert torch.allclose(module(q, k, v, **call), expected, atol=1e-5)
    qat.set_quantizer_state(module, qat.QuantizerState.PASSTHROUGH)
    assert torch.equal(module(q, k, v, **call), expected)


def test_grouped_query_attention() -> None:
    q, k = torch.randn(2, 4, 20, 16), torch.randn(2, 2, 20, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert torch.allclose(barely_quantized(QuantAttention())(q, k, k, enable_gqa=True), expected, atol=1e-5)


class Transposed(nn.Module):
    """Attention of LeViT: values @ probabilities, both transposed."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x.transpose(1, 2) @ x).softmax(dim=-1)
        return (x @ weights.transpose(-2, -1)).relu()


def test_probabilities_as_second_operand() -> None:
    model = nn.Sequential(nn.Conv1d(32, 32, 1), Transposed())
    x = torch.randn(2, 32, 20)
    calibrated(prepare(model, x), (x,))
    assert model[1]._matmul_other_quantizer_2.scale.item() == pytest.approx(1 / 127)
    assert not model[1]._matmul_input_quantizer_2.fixed
    # Nothing in INT8 reads the context, so it has a scale of its own: the attention is quantized as a whole.
    assert [row.name for row in qat.summary(model).quantizers if "result" in row.name] == ["1._matmul_result_quantizer"]
    long = prepare(nn.Sequential(nn.Conv1d(32, 32, 1), Transposed()), torch.randn(1, 32, 600))
    assert "600 tokens" in qat.summary(long).left_float["1.matmul_2"]


@pytest.mark.parametrize("mask", ["boolean", "additive"])
def test_rows_that_are_masked_as_a_whole_have_no_nan(mask: str) -> None:
    padding = PADDING.clone()
    padding[2] = True
    empty = torch.ones(20, 20, dtype=torch.bool).tril().logical_and(padding[0].flip(0).logical_not())  # left padding
    given = empty if mask == "boolean" else torch.zeros(20, 20).masked_fill(empty.logical_not(), -math.inf)
    x = X.transpose(0, 1).clone().requires_grad_()
    model = Attention().eval()
    prepare(model, x)
    qat.calibrate(model, [{"x": x}], progress=False)
    y = model(x, key_padding_mask=padding, need_weights=False)[0]
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    attention = barely_quantized(QuantAttention())
    found, want = attention(X, X, X, given), torch.nn.functional.scaled_dot_product_attention(X, X, X, given)
    assert found.isfinite().all() and torch.allclose(found[:, 2:], want[:, 2:], atol=1e-5)
