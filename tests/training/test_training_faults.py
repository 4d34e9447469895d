import os
import signal
import subprocess
import sys
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat.errors import ConfigError, TrainingError, WriteError
from qat.training import fine_tune, make_loader, supervised_loss
from qat.training.faults import explain_loading, explain_memory, smaller_batch
from tiny_training import NoisyData, TinyNet, evaluate, quiet, train
from write_faults import largest_file, read_only_folder

CRITERION = supervised_loss(nn.CrossEntropyLoss())
SCRIPT = Path(__file__).with_name("tiny_training.py")


def test_a_full_disk_costs_nothing_that_was_saved(tmp_path: Path) -> None:
    whole, broken = TinyNet(), TinyNet()
    broken.load_state_dict(whole.state_dict())
    config = quiet(epochs=2, checkpoint_every_steps=3)
    train(tmp_path / "whole", whole, config)
    steps = 0

    def loss_until_full(model: nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 11:
            full.__enter__()
        return CRITERION(model, batch)

    size = (tmp_path / "whole" / "last.pt").stat().st_size
    full = largest_file(size // 2)
    loader = make_loader(NoisyData(64), 8, seed=1)
    try:
        with pytest.raises(WriteError, match=r"last\.pt cannot be written: the disk is full"):
            fine_tune(broken, loader, loss_until_full, evaluate, config, tmp_path / "broken")
    finally:
        full.__exit__(None, None, None)
    assert not list((tmp_path / "broken").glob("*.tmp"))
    result = train(tmp_path / "broken", broken, config)
    assert result.resumed_at_step == 9
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), broken.state_dict().values(), strict=True)
    )


def test_a_read_only_folder_is_said_before_anything_is_trained() -> None:
    def never(model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError("a step was made")

    loader = make_loader(NoisyData(64), 8)
    with read_only_folder() as folder, pytest.raises(WriteError, match="this user may not write there"):
        fine_tune(TinyNet(), loader, never, evaluate, quiet(), folder / "mine")


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--sleep-after=3", "--config", '{"epochs": 1}']
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "WAITING\n"
        with pytest.raises(ConfigError, match=rf"is in use by process {first.pid} .*choose another output folder"):
            train(tmp_path)
        output, _ = first.communicate("\n")
    assert "RESUMED None" in output
    assert train(tmp_path, config=quiet(epochs=1)).steps == 8


class Dying(NoisyData):
    """Its worker is killed, as the kernel does when memory runs out."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_dies_is_explained_and_the_run_resumes(tmp_path: Path) -> None:
    config = quiet(epochs=1, checkpoint_every_steps=1)
    how = r"(was killed by signal: Killed|died|exited unexpectedly)"  # it may die with a batch of it on its way
    message = rf"loads data {how} \(epoch 0 of training\).*fewer workers.*Run again to resume"
    options = {"num_workers": 1, "shuffle": False}
    with pytest.raises(TrainingError, match=message):
        train(tmp_path, config=config, dataset=Dying(64), **options)
    assert train(tmp_path, config=config, dataset=NoisyData(64), **options).steps == 8


def test_a_batch_of_a_dead_worker_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_: object, **__: object) -> None:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(resource_sharer._resource_sharer, "get_connection", reset)  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=r"loads data died \(a test\)"), explain_loading(lambda: "a test"):
        resource_sharer.DupFd(os.dup(0)).detach()


class Unreadable(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        raise ConfigError("image 7.png cannot be read: cut. Remove it.")


def test_an_error_of_ours_in_a_worker_is_one_sentence() -> None:
    with pytest.raises(ConfigError) as caught, explain_loading(lambda: "a test"):
        next(iter(make_loader(Unreadable(), 2, num_workers=1)))
    assert str(caught.value) == "image 7.png cannot be read: cut. Remove it."


def test_other_errors_pass() -> None:
    for error in (RuntimeError("mine"), ConfigError("mine"), KeyError("mine")):
        with pytest.raises(type(error), match="mine") as caught, explain_loading(lambda: "a test"):
            raise error
        assert caught.value is error


CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 22.05 GiB of which 1.06 GiB is "
    "free. Of the allocated memory 20 GiB is allocated by PyTorch."
)


def test_out_of_memory_says_which_batch_to_try(tmp_path: Path) -> None:
    calls = 0

    def too_large(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        return CRITERION(model, batch)

    loader = make_loader(NoisyData(64), 8, seed=1)
    message = (
        r"memory ran out in epoch 0, optimizer step 2 \(both from 0\): CUDA out of memory. Tried to allocate 1.50 GiB. "
        r"Try batch_size=4 with accumulate=4 instead of 8 with 2, in a new output folder"
    )
    config = quiet(epochs=1, accumulate=2, checkpoint_every_steps=1)
    with pytest.raises(TrainingError, match=message):
        fine_tune(TinyNet(), loader, too_large, evaluate, config, tmp_path)
    # Another program had taken the memory: the same command goes on.
    assert fine_tune(TinyNet(), loader, CRITERION, evaluate, config, tmp_path).resumed_at_step == 2


def test_out_of_memory_in_the_evaluation_and_on_the_cpu(tmp_path: Path) -> None:
    def evaluate_too_much(model: nn.Module) -> dict[str, float]:
        return {"accuracy": float(torch.empty(2**55).sum())}

    message = r"memory ran out in the evaluation after epoch 0.*Evaluate smaller batches"
    with pytest.raises(TrainingError, match=message):
        fine_tune(TinyNet(), make_loader(NoisyData(64), 8), CRITERION, evaluate_too_much, quiet(), tmp_path)


def test_the_innermost_explanation_stays() -> None:
    outer, inner = explain_memory("the whole", lambda: "Lower that."), explain_memory("a part", lambda: "Lower it.")
    with pytest.raises(TrainingError, match=r"^memory ran out in a part: .* Lower it\."), outer, inner:
        torch.empty(2**55)


@pytest.mark.parametrize(
    ("batch", "accumulate", "expected"),
    [
        ((torch.ones(256, 3), torch.ones(256)), 1, "batch_size=128 with accumulate=2 instead of 256 with 1"),
        ({"x": [torch.ones(100)]}, 3, "batch_size=64 with accumulate=6 instead of 100 with 3"),
        (torch.ones(2), 1, "batch_size=1 with accumulate=2"),
        (torch.ones(1, 3), 1, "a batch of one: use smaller inputs"),
        ("text", 1, "Use a smaller batch"),
    ],
)
def test_the_batch_to_try(batch: Any, accumulate: int, expected: str) -> None:
    assert expected in smaller_batch(batch, accumulate, "bf16")
    assert "mixed_precision=bf16" in smaller_batch(batch, accumulate, "no")
    assert "mixed_precision" not in smaller_batch(batch, accumulate, "bf16")


@pytest.mark.gpu
def test_out_of_memory_on_a_gpu(tmp_path: Path) -> None:
    def too_large(model: nn.Module, batch: Any) -> Tensor:
        torch.empty(2**45, device="cuda")
        return CRITERION(model, batch)

    with pytest.raises(TrainingError, match=r"CUDA out of memory.*Try batch_size=4"):
        fine_tune(TinyNet(), make_loader(NoisyData(64), 8), too_large, evaluate, quiet(), tmp_path)
