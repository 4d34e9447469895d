"""The steps together: their order, what each leaves to the next, and the same on two ranks."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from digits_networks import accuracy, batches, digits, quantized, trained, unbalance
from qat.errors import ConfigError
from qat.ptq import RoundingConfig, adaround, correct_biases, equalize, improve, ordered_steps, reestimate_batch_norm

FAST = RoundingConfig(steps=100)


def test_all_steps_on_digits_in_two_bits() -> None:
    model = quantized(trained(), bits=2)
    scores = {"PTQ": accuracy(model)}
    results = improve(
        model,
        batches(),
        ["reestimate_bn", "adaround", "correct_bias"],
        rounding=FAST,
        progress=False,
        after=lambda step: scores.__setitem__(step, accuracy(model)),
    )
    print({name: round(value, 2) for name, value in scores.items()})
    assert list(scores) == ["PTQ", "adaround", "correct_bias", "reestimate_bn"]
    assert list(results) == ["adaround", "correct_bias", "reestimate_bn"]
    assert scores["adaround"] > scores["PTQ"] + 15
    assert scores["reestimate_bn"] > 90
    assert len(results["adaround"].rounded) == 7


def test_bias_correction_aims_at_the_model_from_before_the_rounding() -> None:
    model = quantized(trained(), bits=2)
    by_hand, original = copy.deepcopy(model), copy.deepcopy(model)
    improve(model, batches(2), ["correct_bias", "adaround"], rounding=RoundingConfig(steps=20), progress=False)
    adaround(by_hand, batches(2), RoundingConfig(steps=20), progress=False)
    wrong = copy.deepcopy(by_hand)
    correct_biases(by_hand, batches(2), reference=original, progress=False)
    correct_biases(wrong, batches(2), progress=False)
    assert torch.equal(model.fc.bias, by_hand.fc.bias)  # type: ignore[union-attr,arg-type]
    assert not torch.equal(model.fc.bias, wrong.fc.bias)  # type: ignore[union-attr,arg-type]


def test_equalized_models_have_no_batch_norm_to_reestimate(caplog: pytest.LogCaptureFixture) -> None:
    model = unbalance(trained())
    equalize(model, batches()[0])
    quantized(model, bits=3, per_channel=False)
    before, seen = accuracy(model), list[str]()
    with caplog.at_level(logging.WARNING, "qat"):
        results = improve(model, batches(), ("reestimate_bn", "correct_bias"), progress=False, after=seen.append)
    assert seen == list(results) == ["correct_bias"]
    assert "no BatchNorm is left" in caplog.text
    assert accuracy(model) > before


def test_statistics_come_from_batches_of_their_own() -> None:
    model, twin = quantized(trained()), quantized(trained())
    improve(model, batches(1), ["reestimate_bn"], norm_batches=iter(batches(3)), progress=False)
    reestimate_batch_norm(twin, batches(3), progress=False)
    assert torch.equal(model.bn.running_var, twin.bn.running_var)  # type: ignore[union-attr,arg-type]


def test_batches_in_every_form() -> None:
    x, labels = digits()[0][:128], digits()[1][:128]
    results = []
    for form in ([x], [(x, labels)], [{"x": x}], iter([x])):
        model = quantized(trained(), bits=3)
        steps = ("adaround", "correct_bias", "reestimate_bn")
        improve(model, form, steps, rounding=RoundingConfig(steps=5), progress=False)
        results.append(model.state_dict())
    for other in results[1:]:
        assert all(torch.equal(value, other[key]) for key, value in results[0].items())


def test_wrong_steps_are_explained() -> None:
    assert ordered_steps(("reestimate_bn", "equalize", "reestimate_bn")) == ("equalize", "reestimate_bn")
    with pytest.raises(ConfigError, match=r"unknown step 'correct_biases'.*Did you mean 'correct_bias'"):
        ordered_steps(["correct_biases"])
    with pytest.raises(ConfigError, match=r"Call qat\.ptq\.equalize on the float model"):
        improve(quantized(trained()), batches(1), ["equalize"])


SCRIPT = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from digits_networks import Separable, batches, quantized, unbalance
from qat.ptq import RoundingConfig, equalize, improve
torch.set_num_threads(1)
torch.manual_seed(0)
model = unbalance(Separable().eval())
dist.init_process_group("gloo")
mine = batches(4)[dist.get_rank()::2]
equalize(model, mine[0])
quantized(model, bits=3)
model.fc = torch.nn.Sequential(model.fc, torch.nn.BatchNorm1d(10)).eval()
improve(model, mine, ["adaround", "correct_bias", "reestimate_bn"], rounding=RoundingConfig(steps=20), progress=False)
torch.save(model.state_dict(), f"{sys.argv[2]}/{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_with_their_own_batches_end_with_one_model(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run: Any = subprocess.run(
        [*launcher, str(script), str(Path(__file__).parent), str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    left, right = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert bool(left["fc.1.running_mean"].abs().max() > 0.01)
    for key, value in left.items():
        assert torch.equal(value, right[key]), key
