"""Processes that get ready at the same time, wait for each other and then have the GPU in turns."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

Row = dict[str, Any]
LONGEST, PATIENCE = 1800, 120
"""Seconds in which something must come from one of the processes, and in which a process must get its turn."""


class Turns(NamedTuple):
    """A process's side: `send` what was found, `wait` for the others once all is ready, take turns."""

    sender: Connection
    everyone: Any
    lock: Any

    def send(self, found: Row) -> None:
        """Add to the process's row."""
        self.sender.send(found)

    def wait(self, found: Row) -> None:
        """Add to the row, and wait until every other process is as far or has ended."""
        self.send(found)
        self.everyone.wait(LONGEST)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Have the GPU alone; a process that died meanwhile never gives it back.

        Raises:
            TimeoutError: no turn came.
        """
        if not self.lock.acquire(timeout=PATIENCE):
            raise TimeoutError(f"another process has kept the GPU to itself for {PATIENCE} s")
        try:
            yield
        finally:
            self.lock.release()


def in_turns(work: Callable[..., None], rows: list[Row], *args: Any) -> Iterator[Row]:
    """Run `work(row, turns, *args)` in a process for each row; rows as something is added to them."""
    context = multiprocessing.get_context("spawn")
    everyone, lock, receivers = context.Event(), context.Lock(), []
    for row in rows:
        receiver, sender = context.Pipe(duplex=False)
        turns = Turns(sender, everyone, lock)
        context.Process(target=guarded, args=(work, row, turns, *args), daemon=True).start()
        sender.close()  # so that the end of the process is the end of what comes
        receivers.append(receiver)
    yield from receive(receivers, rows, everyone)


def guarded(work: Callable[..., None], row: Row, turns: Turns, *args: Any) -> None:
    """Work that fails says why."""
    try:
        work(row, turns, *args)
    except Exception as error:  # whatever compilers raise
        traceback.print_exc()
        turns.send({"missing": f"{type(error).__name__}: {str(error)[:200]}"})


def receive(receivers: list[Connection], rows: list[Row], everyone: Any) -> Iterator[Row]:
    """Rows as they get numbers, until every process has ended or nothing has come for too long."""
    senders, ready = dict(zip(receivers, rows, strict=True)), set()
    while senders:
        speaking = wait([*senders], LONGEST)
        if not speaking:
            for row in senders.values():
                row.setdefault("missing", f"nothing came in {LONGEST} s")
                yield row
            return
        for receiver in speaking:
            assert isinstance(receiver, Connection)
            row = senders[receiver]
            try:
                row |= receiver.recv()
            except EOFError:
                del senders[receiver]
                if "ms" not in row:
                    row.setdefault("missing", "its process died")
            ready.add(receiver)
            if len(ready) == len(rows):
                everyone.set()
            yield row
