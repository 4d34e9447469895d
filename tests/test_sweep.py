"""scripts/sweep_models.py: which networks, and what becomes of one that is killed."""

from __future__ import annotations

import runpy
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torchvision

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / "sweep_models.py"), run_name="script")


def test_the_list_is_all_of_torchvision_and_many_of_timm(sweep: dict[str, Any]) -> None:
    names = sweep["all_names"]()
    assert len(names) == len(set(names))
    for module in (torchvision.models, torchvision.models.segmentation):
        assert {f"torchvision/{name}" for name in torchvision.models.list_models(module)} <= set(names)
    assert sum(name.startswith("timm/") for name in names) >= 60
    for glob in (*sweep["SIZES"], *sweep["SLOW"], *sweep["ALONE"]):
        assert any(fnmatch(name, glob) for name in names), f"{glob} is no network of the list"


def test_a_killed_network_is_short_of_memory_and_others_crash(
    sweep: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {}
    for code in (-9, 1):
        done = subprocess.CompletedProcess([], code, stdout="", stderr="Traceback: it broke")
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        ((name, rows[code]),) = sweep["results"](["torchvision/resnet18"], jobs=1, timeout=1.0)
        assert name == "torchvision/resnet18" and not rows[code]["passed"]
    assert (rows[-9]["stage"], rows[1]["stage"]) == ("memory", "crash")
    assert "memory runs out" in rows[-9]["cause"] and "it broke" in rows[1]["cause"]


def test_rows_are_run_again_only_if_asked(sweep: dict[str, Any]) -> None:
    passed, failed = {"passed": True, "stage": ""}, {"passed": False, "stage": "lint"}
    assert [sweep["settled"](row, retry) for row in (passed, failed) for retry in (False, True)] == [
        True, True, True, False,
    ]  # fmt: skip
    assert not sweep["settled"](sweep["NOT_RUN"], retry=False)
