"""The accuracy benchmark goes on where an improvement refuses the network."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import accuracy
from qat.calibration import MethodResult
from qat.errors import ConfigError
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
