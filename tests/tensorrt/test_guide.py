"""Every command of docs/tensorrt.md is one that its script takes."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "tensorrt.md").read_text()
COMMANDS = re.findall(r"^    python scripts/(.+)$", GUIDE.replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, monkeypatch) -> None:
    script, *arguments = shlex.split(command, comments=True)
    assert (ROOT / "scripts" / script).is_file()
    if script == "compare.py":  # Its parser reads the configuration.
        assert arguments == ["--config", "configs/<run>.yaml"]
        return
    monkeypatch.syspath_prepend(ROOT / "scripts")
    importlib.import_module(script.removesuffix(".py")).make_parser().parse_args(arguments)


def test_the_guide_walks_the_whole_way() -> None:
    used = [command.split(maxsplit=1)[0] for command in COMMANDS]
    order = ["lint.py", "build_engine.py", "inspect_engine.py", "run_model.py", "benchmark.py", "compare.py"]
    assert list(dict.fromkeys(used)) == order


@pytest.mark.parametrize("script", ["build_engine", "run_model", "benchmark"])
def test_options_in_the_tables_exist(script, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    known = importlib.import_module(script).make_parser().format_help()
    rows = [row for row in GUIDE.splitlines() if row.startswith(f"| `{script}.py")]
    named = {option for row in rows for option in re.findall(r"--[\w-]+", row.split("|")[1])}
    assert named and all(option in known for option in named)
