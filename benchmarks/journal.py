"""A line a case, kept beside the results of a benchmark that takes long, so that it goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a stopped benchmark, none where there is no file; a last line cut short is taken out of it."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Keep one more."""
    with path.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
