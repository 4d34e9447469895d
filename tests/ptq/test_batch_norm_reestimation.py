"""BatchNorm re-estimation: statistics of the quantized model, and the digits that they bring back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from digits_networks import accuracy, batches, digits, quantized, trained
from qat.errors import CalibrationError
from qat.ptq import reestimate_batch_norm


def test_digits_in_two_bits() -> None:
    model = quantized(trained(), bits=2)
    before = accuracy(model)
    names = reestimate_batch_norm(model, batches(8, 128), progress=False)
    after = accuracy(model)
    print(f"2-bit weights: {before:.2f} -> {after:.2f}")
    assert after > before + 8
    assert names == ("bn", "blocks.0.bn1", "blocks.0.bn2", "blocks.1.bn1", "blocks.1.bn2")


def test_statistics_are_the_mean_over_batches_and_nothing_else_changes() -> None:
    model: Any = quantized(trained(), bits=4).train()
    model.bn.momentum = 0.3
    before = copy.deepcopy(model.state_dict())
    reestimate_batch_norm(model, batches(3), progress=False)
    with torch.no_grad():
        outputs = [model.stem(batch).transpose(0, 1).flatten(1) for batch in batches(3)]
    torch.testing.assert_close(model.bn.running_mean, torch.stack([y.mean(1) for y in outputs]).mean(0))
    torch.testing.assert_close(model.bn.running_var, torch.stack([y.var(1) for y in outputs]).mean(0))
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert all(key.endswith(("running_mean", "running_var")) for key in changed)
    assert len(changed) == 10
    assert model.training
    assert model.bn.momentum == 0.3


def test_dropout_stays_off_and_an_error_puts_everything_back() -> None:
    model: Any = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(64, 4) + 3
    reestimate_batch_norm(model, [x], progress=False)
    torch.testing.assert_close(model[1].running_mean, x.mean(0))
    before = copy.deepcopy(model.state_dict())

    def fails(network: nn.Module, batch: Tensor) -> None:
        network(batch)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        reestimate_batch_norm(model, [x * 2], forward=fails, progress=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model[1].training
    assert model[1].momentum == 0.1


def test_a_norm_that_no_batch_reaches_keeps_its_statistics() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean.fill_(7.0)
    names = reestimate_batch_norm(model, [torch.randn(8, 4)], forward=lambda m, x: m[0](x), progress=False)
    assert names == ("0",)
    assert bool((model[1].running_mean == 7.0).all())


def test_without_batch_norm_it_says_so() -> None:
    model = trained()
    qat.fold_batch_norm_(model, digits()[0][:2])
    with pytest.raises(CalibrationError, match="may have been folded"):
        reestimate_batch_norm(model, batches())
