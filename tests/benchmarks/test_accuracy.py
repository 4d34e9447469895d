"""The accuracy benchmark goes on where an improvement refuses the network or a QAT diverges."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import accuracy
from qat.calibration import MethodResult
from qat.errors import ConfigError, TrainingError
from recipes.config import QatConfig, QuantConfig


@dataclass(frozen=True)
class Config:
    quant: QuantConfig
    qat: QatConfig


def test_a_refusal_is_a_row_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrated(step: str) -> tuple[None, list[MethodResult]]:
        if step == "equalize":
            raise ConfigError("this network computes something else")
        names = ("max", f"max + {step}", f"mse + {step}")
        return None, [MethodResult(name, {"top1": float(len(name))}) for name in names]

    def no_qat(*_: Any) -> list[NoReturn]:
        return []

    monkeypatch.setattr(accuracy, "variant", lambda _base, step, _quant: SimpleNamespace(name=step, metric="top1"))
    monkeypatch.setattr(accuracy, "calibrated", lambda run: calibrated(run.name))
    monkeypatch.setattr(accuracy, "ptq_and_qat", no_qat)
    base: Any = SimpleNamespace(config=Config(QuantConfig(), QatConfig()))
    refused, *others = accuracy.every_row(base)
    assert refused == {"name": "PTQ + equalize", "refused": "this network computes something else"}
    assert [row["name"] for row in others] == [f"PTQ + {step} (max + {step})" for step in accuracy.STEPS[1:]]
    found = {
        "float": {"top1": 90.0},
        "rows": [refused, *others],
        "config": {"model": {"name": "net"}, "data": {"name": "digits", "image_size": 8}},
        "device": "cpu",
    }
    text = accuracy.table(found)
    assert "refused" in text
    assert all(row["name"] in text for row in others)


def test_a_qat_that_diverges_is_a_row_and_the_next_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tune(_model: None, seed: int, how: QatConfig, _folder: Path) -> tuple[None, SimpleNamespace]:
        if how.train.amax_mode == "learned":
            raise TrainingError("the loss is nan")
        return None, SimpleNamespace(history=[{"metrics": {"top1": 80.0 + seed}}])

    monkeypatch.setattr(accuracy, "calibrated", lambda _run: (None, [MethodResult("max", {"top1": 10.0})]))
    config = SimpleNamespace(qat=QatConfig(seeds=(0, 1)), folder=tmp_path)
    run: Any = SimpleNamespace(config=config, tune=tune)
    ptq, learned, distilled = accuracy.ptq_and_qat(run, "hard: ", ("QAT, learned", "QAT + distillation"))
    assert learned == {"name": "hard: QAT, learned", "refused": "the loss is nan"}
    assert (ptq["metrics"], distilled["metrics"]) == ([{"top1": 10.0}], [{"top1": 80.0}, {"top1": 81.0}])
