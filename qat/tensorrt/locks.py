"""A lock between processes, so that two runs do not build or write the same file at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def file_lock(path: str | Path) -> Iterator[None]:
    """Hold an exclusive lock for `path` until the block ends; waits for another process that holds it.

    The lock is on a hidden file beside `path`, which stays. The system releases it when a process dies.

    Raises:
        OSError: the folder cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("a+b") as handle:
        _acquire(handle)
        try:
            yield
        finally:
            _release(handle)


if sys.platform == "win32":
    import msvcrt

    def _acquire(handle: IO[bytes]) -> None:
        while True:
            try:
                handle.seek(0)
                msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
                return
            except OSError:
                time.sleep(0.1)

    def _release(handle: IO[bytes]) -> None:
        handle.seek(0)
        msvcrt.locking(handle.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _acquire(handle: IO[bytes]) -> None:
        # Polling rather than a blocking flock, so that Ctrl-C and other threads are served while waiting.
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.1)

    def _release(handle: IO[bytes]) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)
