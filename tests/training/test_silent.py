"""A quantizer that makes zeros of everything is named once, when training begins."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from qat.quantizer import named_quantizers
from qat.training.silent import silence_is_said
from tiny_training import TinyNet, quiet, train


@pytest.mark.parametrize(("amax", "said"), [(1e6, 1), (2.0, 0)])
def test_training_says_which_quantizer_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, amax: float, said: int
) -> None:
    torch.manual_seed(0)
    model = TinyNet()
    model.input_quantizer.amax = amax
    with caplog.at_level(logging.WARNING, logger="qat"):
        train(tmp_path, model, quiet(epochs=2, accumulate=2))
    messages = [record.getMessage() for record in caplog.records if "rounded to zero" in record.getMessage()]
    assert len(messages) == said
    assert all("'input_quantizer' (values up to" in m and "amax 1e+06" in m for m in messages)
    assert not any(quantizer._forward_hooks for _, quantizer in named_quantizers(model))


def test_zeros_are_not_silence_and_many_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList(TinyNet() for _ in range(7))
    with torch.no_grad():
        model[0].first.weight.zero_()
        model[0].first.bias.zero_()
    for net in model:
        net.input_quantizer.amax = 1e6
    with silence_is_said(model):
        for net in model:
            net(torch.ones(2, 6))
    (record,) = caplog.records
    assert "'0.input_quantizer'" not in record.getMessage()
    assert "'1.input_quantizer'" in record.getMessage()
    assert " and 1 more." in record.getMessage()
