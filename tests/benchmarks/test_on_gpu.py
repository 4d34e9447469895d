"""The script that runs everything on a GPU names scripts, options and configurations that there are."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "on_gpu.sh"


def run(python: str, logs: Path, parts: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "LOGS": str(logs), "PARTS": parts}
    return subprocess.run([str(SCRIPT), *args], capture_output=True, text=True, env=environment, check=False)


def test_every_step_is_called_with_what_exists(tmp_path: Path) -> None:
    done = run("echo", tmp_path, "tests speed compiled accuracy", "/data/cifar10")
    assert done.returncode == 0, done.stderr
    calls = {log.stem: log.read_text().split() for log in tmp_path.glob("*.log")}
    networks = ("resnet50", "efficientnet_b0", "bert"), ("mobilenet_v2", "efficientnet_b0", "resnet50")
    names = [f"{part}_{n}" for part, ns in zip(("step", "accuracy"), networks, strict=True) for n in ns]
    names += [f"peers_{n}" for n in networks[1]]
    assert set(calls) == {"tests", "calibration", "kernels", "compiled_ways", *names}
    for words in calls.values():
        for word in words:
            if word.endswith((".py", ".yaml")):
                assert (ROOT / word).is_file(), word
    options = " ".join(calls["accuracy_mobilenet_v2"])
    assert "--data-dir /data/cifar10" in options and "--float_train.epochs 30" in options
    assert re.search(r"--qat\.epochs 3 ", options)
    assert "--model.checkpoint runs/on_gpu/resnet50/float/best.pt" in " ".join(calls["peers_resnet50"])


@pytest.mark.parametrize(("parts", "status", "said"), [("speed", 1, "failed: calibration kernels"), ("x", 2, "'x'")])
def test_failures_and_unknown_parts_are_said(tmp_path: Path, parts: str, status: int, said: str) -> None:
    done = run("false", tmp_path, parts)
    assert done.returncode == status
    assert said in done.stderr
    assert (tmp_path / "failed").exists() == (status == 1)
