"""docs/known_faults.md promises a test for every kind of fault: the tests that it names exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line.split(" | ") for line in (ROOT / "docs" / "known_faults.md").read_text().splitlines() if "tests/" in line]


def test_every_kind_is_listed() -> None:
    assert len(ROWS) == 22


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| ").partition(" (")[0])
def test_its_tests_exist(row: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[-1])
    assert named
    for file, test in named:
        functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
        assert test in functions, f"{file} has no {test}"
