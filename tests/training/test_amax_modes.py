"""Learned amax stays positive whoever trains it; re-estimated amax moves once a step, whatever is shared or divided."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_TENSOR
from qat.quantizer import AmaxMode, QuantizerState, TensorQuantizer, named_quantizers
from qat.training import apply_amax_mode, build_optimizer
from qat.training.amax import MovingAmax
from tiny_training import NoisyData, TinyNet, quiet, train


def learned(value: float) -> TensorQuantizer:
    quantizer = TensorQuantizer()
    quantizer.amax = 1.0
    quantizer.set_amax_mode(AmaxMode.LEARNED)
    quantizer._amax.data.fill_(value)
    return quantizer


def test_amax_below_zero_is_seen_as_its_magnitude_everywhere() -> None:
    x, positive = torch.randn(50), learned(0.5)
    expected = positive(x)
    assert torch.equal(learned(-0.5)(x), expected)
    assert learned(-0.5).amax == 0.5
    assert learned(-0.5).scale == positive.scale
    assert "amax=0.5" in repr(learned(-0.5))
    frozen = learned(-0.5)
    frozen.set_amax_mode("frozen")
    assert torch.equal(frozen(x), expected)
    loaded = TensorQuantizer()
    loaded.load_state_dict(learned(-0.5).state_dict())
    assert torch.equal(loaded(x), expected)


def test_state_dict_still_shares_memory_with_the_learned_parameter() -> None:
    """Kind: moving averages of weights write through the state dict (ultralytics#26083)."""
    quantizer = learned(-0.5)
    quantizer.state_dict()["_amax"].fill_(3.0)
    assert quantizer.amax == 3.0


@pytest.mark.parametrize("descriptor", ["per channel", "per tensor"])
def test_lsq_from_the_first_step_in_a_plain_loop_without_guard(descriptor: str) -> None:
    model = TinyNet()
    if descriptor == "per tensor":
        model.weight_quantizer = TensorQuantizer(QUANT_DESC_8BIT_WEIGHT_PER_TENSOR)
        model.weight_quantizer.amax = model.head.weight.detach().abs().max()
    apply_amax_mode(model, "learned")
    before = {name: q.amax.detach().clone() for name, q in named_quantizers(model)}  # type: ignore[union-attr]
    optimizer = build_optimizer(model, lr=3.0, momentum=0.9)  # far too large: amax crosses zero
    data, lowest = NoisyData(64), torch.inf
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.inputs), data.labels).backward()
        optimizer.step()
        lowest = min(lowest, *(q._amax.min().item() for _, q in named_quantizers(model)))
        for name, quantizer in named_quantizers(model):
            assert quantizer.scale is not None
            assert bool((quantizer.scale > 0).all())
            assert not torch.equal(quantizer.amax, before[name])  # type: ignore[arg-type]
            before[name] = quantizer.amax.detach().clone()  # type: ignore[union-attr]
    assert lowest < 0


def test_shared_quantizer_can_be_trained_while_it_moves() -> None:
    quantizer = TensorQuantizer()
    quantizer.amax = 1.0
    quantizer.set_amax_mode("reestimated")
    x = torch.full((4,), 2.0, requires_grad=True)
    (quantizer(x * 1) + quantizer(x * 2)).sum().backward()
    assert quantizer.amax == pytest.approx((1.0 * 0.99 + 0.02) * 0.99 + 0.04)


def test_weights_take_their_maximum_at_once() -> None:
    for quantizer in (TensorQuantizer(QUANT_DESC_8BIT_WEIGHT_PER_TENSOR), TensorQuantizer()):
        quantizer.amax = 1.0
        quantizer.set_amax_mode("reestimated")
        quantizer(nn.Parameter(torch.tensor([0.25, -4.0])))
        assert quantizer.amax == 4.0


def test_one_move_a_step_by_the_maximum_of_all_calls() -> None:
    quantizer, idle, float_one = TensorQuantizer(), TensorQuantizer(), TensorQuantizer()
    float_one.set_state(QuantizerState.PASSTHROUGH, "left float")
    for q in (quantizer, idle):
        q.amax = 1.0
        q.set_amax_mode("reestimated")
    moving = MovingAmax([quantizer, idle, float_one])
    for _ in range(2):
        before = quantizer.amax.item()  # type: ignore[union-attr]
        for value in (3.0, -5.0, 0.5, 5.0):
            quantizer(torch.tensor([value]))
            assert quantizer.amax == before
        moving.apply()
        assert quantizer.amax == pytest.approx(before + 0.01 * (5.0 - before))
    assert idle.amax == 1.0
    moving.close()
    before = quantizer.amax.item()  # type: ignore[union-attr]
    quantizer(torch.tensor([9.0]))
    assert quantizer.amax == pytest.approx(before + 0.01 * (9.0 - before))


@pytest.mark.parametrize("mode", ["learned", "reestimated"])
def test_accumulated_batches_move_amax_like_the_big_one(tmp_path: Path, mode: str) -> None:
    small = TinyNet()
    big, start = copy.deepcopy(small), small.input_quantizer.amax.clone()
    data: Dataset[Any] = NoisyData(64)
    train(tmp_path / "a", small, quiet(amax_mode=mode, accumulate=4, lr=0.2), dataset=data, batch_size=4)
    train(tmp_path / "b", big, quiet(amax_mode=mode, lr=0.2), dataset=data, batch_size=16)
    moved: Tensor = (big.input_quantizer.amax - start).abs()
    assert moved > 1e-3
    for (name, left), (_, right) in zip(named_quantizers(small), named_quantizers(big), strict=True):
        torch.testing.assert_close(left.amax, right.amax, rtol=1e-4, atol=1e-5, msg=name)
        assert left.step_max is None
