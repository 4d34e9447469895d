"""A run whose folder another one has, whose folder may not be written, and that finds no memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.errors import ConfigError, TrainingError, WriteError
from qat.locks import hold_folder
from recipes.classification import Classification
from recipes.config import ModelConfig, RunConfig
from write_faults import read_only_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Classification:
    return Classification(RunConfig(output_dir=tmp_path / "run", device="cpu", model=ModelConfig("squeezenet1_1")))


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with hold_folder(folder):
        command = [sys.executable, str(ROOT / "scripts" / "qat_finetune.py"), f"--output_dir={folder}"]
        second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert second.stderr.strip().splitlines()[-1].startswith(f"error: {folder} is in use by process ")
    assert [path.name for path in folder.iterdir()] == [".lock"]


HOLD = """
import sys
from qat.locks import hold_folder
held = hold_folder(sys.argv[1])
print("HELD", flush=True)
input()
"""


@pytest.mark.parametrize("stage", ["float_model", "calibrate", "fine_tune"])
def test_every_stage_that_writes_holds_the_folder(run: Classification, stage: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "float_model": (),
        "calibrate": (nn.Identity(),),
        "fine_tune": (nn.Identity(), 0),
    }
    command = [sys.executable, "-c", HOLD, str(run.config.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "HELD\n"
        with pytest.raises(ConfigError, match=rf"in use by process {other.pid}"):
            getattr(run, stage)(*arguments[stage])
        other.communicate("\n")
    run.hold()


def test_a_run_cleans_up_after_killed_ones(run: Classification) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder = run.config.folder
    (folder / "ptq").mkdir(parents=True)
    for path in (folder / f".qat.onnx.{dead.pid}.tmp", folder / "ptq" / f".max.pt.{dead.pid}.tmp", folder / "qat.onnx"):
        path.touch()
    run.hold()
    assert sorted(path.name for path in folder.rglob("*")) == [".lock", "ptq", "qat.onnx"]


def test_a_read_only_output_folder_is_said_before_anything_is_trained() -> None:
    config = RunConfig(device="cpu", model=ModelConfig("squeezenet1_1"))
    with read_only_folder() as folder:
        object.__setattr__(config, "output_dir", folder / "run")
        with pytest.raises(WriteError, match=r"run/\.lock cannot be written: this user may not write there"):
            Classification(config).float_model()


class TooLarge(nn.Module):
    """A network that no device has memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.conv(x)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.")


def test_out_of_memory_in_evaluation_and_calibration_names_the_key(run: Classification) -> None:
    message = r"memory ran out in {}: CUDA out of memory\. Tried to allocate 2\.00 GiB\. Lower data\.eval_batch_size"
    with pytest.raises(TrainingError, match=message.format("evaluation")):
        run.evaluate(TooLarge())
    model = TooLarge()
    qat.quantize_(model)
    with pytest.raises(TrainingError, match=message.format("calibration")):
        run.calibrate(model)
