"""Processes take turns, and one that dies or fails does not hold up the others."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from typing import Any

import pytest

import turns
from turns import Row, Turns


def work(row: Row, turns: Turns, times: int) -> None:
    """As the row's name says."""
    if row["name"] == "dies":
        os._exit(1)
    turns.wait({"ready": True})
    for _ in range(times):
        with turns.one():
            pass
    if row["name"] == "fails":
        raise RuntimeError("12 GiB")
    turns.send({"ms": times})


def test_a_process_that_dies_or_fails_does_not_hold_up_the_others() -> None:
    rows: list[Row] = [{"name": name} for name in ("well", "fails", "dies")]
    assert len([*turns.in_turns(work, rows, 3)]) == 4 + 3
    assert rows == [
        {"name": "well", "ready": True, "ms": 3},
        {"name": "fails", "ready": True, "missing": "RuntimeError: 12 GiB"},
        {"name": "dies", "missing": "its process died"},
    ]


def test_silence_ends_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONGEST", 0.01)
    receiver, _sender = Pipe(duplex=False)
    rows: list[dict[str, Any]] = [{"name": "hangs"}]
    assert [*turns.receive([receiver], rows, threading.Event())] == rows
    assert rows[0]["missing"] == "nothing came in 0.01 s"


def test_a_turn_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.01)
    one: Any = Turns(Pipe()[1], None, threading.Lock())
    with one.one(), pytest.raises(TimeoutError, match="to itself"), one.one():
        pass
    assert not one.lock.locked()
