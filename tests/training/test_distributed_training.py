import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("tiny_training.py")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _run(folder: Path, processes: int, batch_size: int, config: str, *more: str, fails: bool = False) -> str:
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, str(SCRIPT), str(folder), f"--batch-size={batch_size}", "--config", config, *more]
    done = subprocess.run(command, check=False, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout


def _finals(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob("final*.pt"))]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("learned", ["--distill"]),
        pytest.param("reestimated", [], marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one_with_the_global_batch(tmp_path: Path, mode: str, options: list[str]) -> None:
    config = json.dumps({"epochs": 2, "accumulate": 2, "clip_norm": 1.0, "freeze_bn_epoch": 0, "amax_mode": mode})
    options = ["--noise=0.5", "--norm", *options]
    _run(tmp_path / "two", 2, 4, config, *options)
    _run(tmp_path / "one", 1, 8, config, *options)
    left, right = _finals(tmp_path / "two")
    (single,) = _finals(tmp_path / "one")
    for key, value in single.items():
        assert torch.equal(left[key], right[key]), key
        torch.testing.assert_close(left[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_resume_with_their_own_generators(tmp_path: Path) -> None:
    config = '{"epochs": 2, "amax_mode": "learned", "checkpoint_every_steps": 3}'
    options = ("--noise=0.5", "--norm", "--dropout=0.3", "--workers=1")
    _run(tmp_path / "whole", 2, 4, config, *options)
    assert _run(tmp_path / "broken", 2, 4, config, *options, "--fail-after=12", fails=True) == ""
    assert "RESUMED 12" in _run(tmp_path / "broken", 2, 4, config, *options)
    left, right, *again = [*_finals(tmp_path / "whole"), *_finals(tmp_path / "broken")]
    for key, value in left.items():
        assert all(torch.equal(value, other[key]) for other in (right, *again)), key
