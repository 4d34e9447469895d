"""The checks of benchmarks/kills.py find what they look for."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from kills_attempt import Attempt, stage_of, stage_of_write
from kills_check import damaged, differences, files_of, steps_done, temporaries


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "whole")


def make_run(folder: Path) -> Path:
    (folder / "float").mkdir(parents=True)
    checkpoint = {
        "position": {"step": 7},
        "model": {"w": torch.arange(4000.0)},
        "history": [{"seconds": folder.stat().st_ino}],
    }
    torch.save(checkpoint, folder / "float" / "last.pt")
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": 1}))
    (folder / "results.json").write_text(json.dumps({"float": {"top1": 5.0}, "environment": str(folder)}))
    (folder / "float" / ".lock").touch()
    return folder


def test_equal_runs_are_equal(folder: Path, tmp_path: Path) -> None:
    assert differences(folder, make_run(tmp_path / "broken")) == []
    assert damaged(folder) == []
    assert [path.name for path in files_of(folder)] == ["config.yaml", "last.pt", "results.json"]
    assert steps_done(folder) == {"float": 7}


def test_one_bit_one_digit_and_one_file_are_seen(folder: Path, tmp_path: Path) -> None:
    broken = make_run(tmp_path / "broken")
    weights = torch.load(broken / "float" / "last.pt", weights_only=True)
    weights["model"]["w"][3] = 3.0000002
    torch.save(weights, broken / "float" / "last.pt")
    (broken / "results.json").write_text(json.dumps({"float": {"top1": 5.1}}))
    (broken / "config.yaml").unlink()
    (broken / "float" / ".last.pt.1.tmp").touch()
    found = "; ".join(differences(folder, broken))
    for part in ("last.pt.model.w: tensors differ", "top1: 5.0 -> 5.1", "config.yaml is missing", "tmp is left over"):
        assert part in found
    assert len(temporaries(broken)) == 1


@pytest.mark.parametrize("name", ["float/last.pt", "results.json"])
def test_a_cut_file_is_damaged(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    assert [line.partition(":")[0] for line in damaged(folder)] == [name]


STACK = """Thread 0x0001 (most recent call first):
  File "/lib/threading.py", line 1 in wait

Current thread 0x0002 (most recent call first):
  File "/x/qat/onnx/parity.py", line 9 in compare
  File "/x/recipes/run.py", line 250 in export
  File "/x/scripts/qat_finetune.py", line 44 in _export_and_report
  File "/x/scripts/qat_finetune.py", line 38 in main
  File "/x/scripts/_common.py", line 16 in <lambda>
  File "/x/scripts/qat_finetune.py", line 61 in <module>
"""


def test_the_stage_is_read_from_the_stack_or_the_file() -> None:
    assert stage_of(STACK) == "export"
    assert stage_of(STACK.replace("in export", "in calibrate")) == "calibration"
    assert stage_of("") == stage_of(STACK[STACK.index('  File "/x/scripts/_common') :]) == "start or end"
    assert stage_of_write("qat/seed0/.last.pt.3.tmp") == "fine-tuning"
    assert stage_of_write(".qat.onnx.3.tmp") == "export"
    assert stage_of_write(".results.json.3.tmp") == "results"


def test_an_attempt_is_killed_when_it_has_used_its_time(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run", tmp_path / "attempt.log")
    assert attempt.kill_at(0.3, in_a_write=False)
    assert attempt.process.returncode == -9
    assert not (tmp_path / "run" / "results.json").exists()
