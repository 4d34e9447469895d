import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qat.errors import ConfigError
from qat.training import fine_tune, make_loader, supervised_loss
from tiny_training import NoisyData, TinyNet, evaluate, quiet, train

SCRIPT = Path(__file__).with_name("tiny_training.py")
CRITERION = supervised_loss(nn.CrossEntropyLoss())


class StopError(Exception):
    """Stands for a kill within the process."""


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def _command(folder: Path, *more: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    settings = '{"epochs": 3, "optimizer": "adamw", "amax_mode": "reestimated", "checkpoint_every_steps": 3}'
    options = ["--dropout=0.3", "--noise=0.5", "--norm", "--workers=2", "--config", settings]
    return [sys.executable, str(SCRIPT), str(folder), *options, *more]


ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_sigkill_in_mid_epoch_then_resume_gives_the_same_weights(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(_command(whole), check=True, env=ENVIRONMENT, capture_output=True)
    # 8 steps an epoch: 13 steps are done, in the middle of epoch 1; the last checkpoint is of step 12.
    killed = subprocess.Popen(
        _command(broken, "--sleep-after=13"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        text=True,
    )
    with killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "WAITING\n"
        killed.kill()
    assert not (broken / "final0.pt").exists()
    resumed = subprocess.run(_command(broken), check=True, env=ENVIRONMENT, capture_output=True, text=True)
    assert "RESUMED 12" in resumed.stdout
    for name in ("final0.pt", "last.pt"):
        states = [torch.load(folder / name, weights_only=True) for folder in (whole, broken)]
        if name == "last.pt":
            assert states[0]["position"] == states[1]["position"]
            assert states[0]["history"][2]["metrics"]["accuracy"] > states[0]["history"][0]["metrics"]["accuracy"]
            histories = [[{**r, "seconds": 0} for r in state["history"]] for state in states]
            assert histories[0] == histories[1]
            states = [state["model"] for state in states]
        assert _equal(*states)


class PlainLoader:
    """Has no skip, and draws its order and its noise from the global generators, as many loaders do."""

    def __len__(self) -> int:
        return 6

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = NoisyData(48)
        order = torch.randperm(48)
        for indices in order.split(8):
            yield data.inputs[indices] + 0.1 * torch.randn(8, 6), data.labels[indices]


@pytest.mark.parametrize("stop_at", [1, 8, 9, 17])
def test_resume_of_a_loader_that_cannot_skip(tmp_path: Path, stop_at: int) -> None:
    config = quiet(epochs=3, checkpoint_every_steps=2)
    results = []
    for folder, stop in ((tmp_path / "whole", -1), (tmp_path / "broken", stop_at)):
        calls = 0

        def loss_fn(model: nn.Module, batch: Any, stop: int = stop) -> Tensor:
            nonlocal calls
            if calls == stop:
                raise StopError
            calls += 1
            return CRITERION(model, batch)

        for _ in range(2):
            torch.manual_seed(0)
            model = TinyNet(dropout=0.3)
            try:
                fine_tune(model, PlainLoader(), loss_fn, evaluate, config, folder)
                break
            except StopError:
                calls = stop + 1
        results.append(model.state_dict())
    assert _equal(*results)


def test_a_finished_run_only_loads_its_best_weights(tmp_path: Path) -> None:
    first = TinyNet()
    train(tmp_path, first)
    second = TinyNet()
    result = train(tmp_path, second)
    assert result.resumed_at_step == result.steps == 16
    assert len(result.history) == 2
    assert _equal(first.state_dict(), second.state_dict())


@pytest.mark.parametrize(
    ("config", "loader", "named"),
    [
        ({"lr": 0.04}, {}, r"lr was 0\.05 and is now 0\.04"),
        ({"seed": 7}, {}, "seed was 0 and is now 7"),
        ({}, {"seed": 7}, r"loader\.seed was 1 and is now 7"),
        ({}, {"batch_size": 4}, "batches_per_epoch was 8 and is now 16"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, config: Any, loader: Any, named: str) -> None:
    train(tmp_path)
    with pytest.raises(ConfigError, match=named):
        train(tmp_path, config=quiet(**config), **loader)


def test_a_damaged_or_unfitting_checkpoint_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(ConfigError, match=r"last\.pt does not fit this model"):
        train(tmp_path, TinyNet(norm=True))
    content = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "last.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"last\.pt cannot be read"):
        train(tmp_path)


def test_a_loader_made_by_make_loader_loads_no_sample_twice(tmp_path: Path) -> None:
    class Counting(NoisyData):
        drawn = 0

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            type(self).drawn += 1
            return super().__getitem__(index)

    loader = make_loader(Counting(64), 8)
    config = quiet(epochs=1, checkpoint_every_steps=6)

    def stopping(model: nn.Module, batch: Any) -> Tensor:
        if Counting.drawn == 56:
            raise StopError
        return CRITERION(model, batch)

    with pytest.raises(StopError):
        fine_tune(TinyNet(), loader, stopping, evaluate, config, tmp_path)
    Counting.drawn = 0
    fine_tune(TinyNet(), loader, CRITERION, evaluate, config, tmp_path)
    assert Counting.drawn == 16
