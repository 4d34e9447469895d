"""What a results file says of where it was made."""

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest

module = importlib.import_module("qat.report.environment")


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in ("qat/code.py", "results/table.json", "docs/picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "qat" / "code.py"))
    return tmp_path


def test_results_and_pictures_do_not_make_a_checkout_dirty(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "--short=12", "HEAD")
    (checkout / "results" / "table.json").write_text("2")
    (checkout / "docs" / "picture.png").unlink()
    assert module._commit() == head
    (checkout / "qat" / "code.py").write_text("2")
    assert module._commit() == f"{head}-dirty"


def test_without_history_the_variable_says_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "code.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("QAT_COMMIT", "abc")
    assert module._commit() == "abc"
