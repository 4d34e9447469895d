import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qat.errors import ConfigError
from qat.training.checkpoint import check_same_run, load_best, load_checkpoint, save_checkpoint
from qat.training.rng import capture_rng, restore_rng, seed_all


def _draw() -> tuple[float, float, float, float]:
    return random.random(), float(np.random.rand()), float(np.random.randn()), torch.rand(()).item()


def test_generators_come_back_through_a_file(tmp_path: Path) -> None:
    seed_all(3)
    np.random.randn()
    save_checkpoint(tmp_path / "a.pt", {"rng": capture_rng()})
    expected = [_draw() for _ in range(3)]
    seed_all(99)
    restore_rng(load_checkpoint(tmp_path / "a.pt")["rng"])
    assert [_draw() for _ in range(3)] == expected


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.98])
def test_a_cut_file_is_named(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"model": nn.Linear(50, 50).state_dict()})
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept >= 1 else kept * len(content))])
    with pytest.raises(ConfigError, match=r"last\.pt cannot be read .* damaged"):
        load_checkpoint(path)


def test_foreign_files_are_refused_and_run_no_code(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    with pytest.raises(ConfigError, match="is not one that"):
        load_checkpoint(tmp_path / "foreign.pt")
    torch.save({"format": 1, "model": nn.Linear(1, 1)}, tmp_path / "pickled.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_checkpoint(tmp_path / "pickled.pt")
    with pytest.raises(ConfigError, match="does not exist"):
        load_checkpoint(tmp_path / "absent.pt")


def test_an_interrupted_write_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 1})

    def cut(values: object, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", cut)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(path, {"step": 2})
    assert load_checkpoint(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_differing_fields_are_named() -> None:
    check_same_run({"lr": 1.0}, {"lr": 1.0}, "run/last.pt")
    with pytest.raises(ConfigError, match=r"in run cannot be resumed: lr was 1\.0 and is now 2\.0; seed was None"):
        check_same_run({"lr": 1.0}, {"lr": 2.0, "seed": 1}, "run/last.pt")


def test_best_of_another_model_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "best.pt", {"model": nn.Linear(2, 2).state_dict(), "metrics": {"accuracy": 0.5}})
    assert load_best(nn.Linear(2, 2), tmp_path) == {"accuracy": 0.5}
    with pytest.raises(ConfigError, match=r"best\.pt does not fit this model"):
        load_best(nn.Linear(2, 3), tmp_path)
