"""The recipe with better PTQ in front of fine-tuning and the float model as its teacher, on real digits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recipes.run as recipe
from qat.errors import ConfigError
from qat.training import DistillConfig
from recipes.classification import Classification
from recipes.config import RunConfig, build_parser, parse

SMALL = (
    "--model.name=shufflenet_v2_x0_5",
    "--data.image_size=32",
    "--data.batch_size=128",
    "--float_train.epochs=6",
    "--float_train.lr=0.004",
    "--float_train.progress=false",
    "--float_train.channels_last=false",  # so that a loaded model adds in the same order
    "--qat.epochs=1",
    "--qat.train.progress=false",
    "--quant.batches=2",
    "--calibrator=max",
    "--per-channel=false",
    "--device=cpu",
)
IMPROVE = ("--quant.improve=[correct_bias, equalize, adaround, reestimate_bn]", "--quant.rounding.steps=3")
DISTILL = ("--qat.distill.weight=0.5", "--qat.distill.features=[stage*.0]", "--qat.distill.temperature=2")


def load(*args: str) -> RunConfig:
    return parse(build_parser("test"), args)[0]


def test_keys() -> None:
    config = load(*SMALL, *IMPROVE, *DISTILL)
    assert config.quant.improve == ("correct_bias", "equalize", "adaround", "reestimate_bn")
    assert config.quant.rounding.steps == 3
    assert config.qat.distill == DistillConfig(0.5, 2.0, ("stage*.0",))
    assert not load().qat.distill.active
    with pytest.raises(ConfigError, match=r"'equalise'.*Did you mean 'equalize'"):
        load("--quant.improve=[equalise]")
    with pytest.raises(ConfigError, match="temperature"):
        load("--qat.distill.temperature=0")
    with pytest.raises(ConfigError, match=r"distill\.tempreature"):
        load("--qat.distill.tempreature=2")


def test_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Classification(load(*SMALL, *IMPROVE, *DISTILL, f"--output_dir={tmp_path}"))
    model = run.float_model()
    before = run.evaluate(model)
    run.quantize(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    results = run.calibrate(model)
    assert [r.method for r in results] == ["max", "max + adaround", "max + adaround + correct_bias"]
    assert results[-1].metrics == run.evaluate(run.load_quantized(tmp_path / "ptq" / "model.pt"))
    assert results[1].metrics == run.evaluate(run.load_quantized(run.config.ptq_file("max + adaround")))
    assert before["top1"] > 20, "the float model learned nothing, so nothing was compared"

    teachers: list[nn.Module] = []
    plain: Any = recipe.distilled_loss

    def watch(loss: Any, teacher: nn.Module, config: DistillConfig, logits: Any) -> Any:
        teachers.append(teacher)
        return plain(loss, teacher, config, logits)

    monkeypatch.setattr(recipe, "distilled_loss", watch)
    tuned, _ = run.fine_tune(model, 0)
    assert run.evaluate(teachers[0]) == before
    assert not torch.equal(tuned.conv1[0].weight, model.conv1[0].weight)  # type: ignore[index,union-attr]
