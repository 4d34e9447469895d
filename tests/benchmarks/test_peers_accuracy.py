"""The comparison with other toolkits runs without them, and says which were missing."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import peers_accuracy
from peers import fake_tensor_quant
from qat.errors import ConfigError, TrainingError

TINY = [
    "--model.name=shufflenet_v2_x0_5",
    "--data.image_size=32",
    "--data.batch_size=128",
    "--float_train.epochs=2",
    "--float_train.lr=0.004",
    "--quant.batches=2",
    "--quant.methods=[max,percentile]",
    "--qat.epochs=1",
    "--device=cpu",
]


def test_ours_has_a_row_and_missing_toolkits_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    monkeypatch.setitem(sys.modules, "pytorch_quantization", None)
    args = [*TINY, f"--output_dir={tmp_path / 'run'}", f"--results={tmp_path}"]
    assert peers_accuracy.main(args) == 0
    found = json.loads((tmp_path / "peers_accuracy_digits_shufflenet_v2_x0_5.json").read_text())
    ours, *missing = found["rows"]
    assert set(ours["ptq"]) == {"max", "percentile=99.9", "percentile=99.99"}
    assert [len(ours["metrics"]), ours["epochs"], found["layers"]] == [1, 1, 57]
    assert 0 < ours["weights"] < ours["quantizers"] <= 2 * ours["weights"]
    assert [row["name"] for row in missing] == ["modelopt", "pytorch_quantization"]
    assert all("ImportError" in row["missing"] or "ModuleNotFoundError" in row["missing"] for row in missing)
    assert f"{ours['metrics'][0]['top1']:.2f}" in capsys.readouterr().out

    def fail(*_: Any) -> NoReturn:
        raise AssertionError("a row that was there was made again")

    monkeypatch.setitem(peers_accuracy.TOOLKITS, "ours", fail)
    assert peers_accuracy.main([*args, "--peers", "ours"]) == 0


def test_a_toolkit_that_fails_is_a_row_and_an_error_of_ours_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: Exception) -> Any:
        def toolkit(*_: Any) -> NoReturn:
            raise error

        return toolkit

    monkeypatch.setitem(peers_accuracy.TOOLKITS, "modelopt", refuse(RuntimeError("no such layer")))
    row = peers_accuracy.row_or_reason(None, "modelopt", torch.nn.Linear(1, 1))
    assert row == {"name": "modelopt", "missing": "RuntimeError: no such layer"}
    monkeypatch.setitem(peers_accuracy.TOOLKITS, "modelopt", refuse(ConfigError("another folder")))
    with pytest.raises(ConfigError, match="another folder"):
        peers_accuracy.row_or_reason(None, "modelopt", torch.nn.Linear(1, 1))
    monkeypatch.setitem(peers_accuracy.TOOLKITS, "ours", refuse(RuntimeError("a fault of ours")))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        peers_accuracy.row_or_reason(None, "ours", torch.nn.Linear(1, 1))


def test_a_seed_whose_training_fails_is_counted_and_the_others_go_on(tmp_path: Path) -> None:
    class Run:
        config = SimpleNamespace(qat=SimpleNamespace(seeds=(0, 1, 2)))

        def tune(self, model: Any, seed: int, how: Any, folder: Path) -> Any:
            if seed == 1:
                raise TrainingError("the loss is nan in epoch 1")
            return model, SimpleNamespace(history=[{"metrics": {"top1": 80.0 + seed}}])

    tuned, failed = peers_accuracy.tune_all(Run(), torch.nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]
    row = {"name": "modelopt", "metrics": [result.history[-1]["metrics"] for result in tuned], "failed": failed}
    assert failed == {"1": "the loss is nan in epoch 1"}
    assert peers_accuracy.after_qat(row) == "81.00 +- 1.00, 1 of 3 seeds failed"
    assert peers_accuracy.after_qat({"metrics": [], "failed": {"0": "", "1": ""}}) == "2 of 2 seeds failed"


def test_the_stand_in_for_the_extension_has_its_arithmetic() -> None:
    x, amax = torch.randn(64, 9), torch.rand(64, 1) + 0.5
    bound = np.float32(127)
    scale = bound / amax.numpy()
    expected = np.clip(np.rint(x.numpy() * scale), -bound, bound) / scale
    assert np.array_equal(fake_tensor_quant(x, amax, 8, False, False).numpy(), expected)
    assert fake_tensor_quant(x, torch.tensor(0.0)).count_nonzero() == 0
    assert fake_tensor_quant(x.bfloat16(), torch.tensor(1.0)).dtype is torch.bfloat16
