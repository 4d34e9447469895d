"""Locks between processes, so that two runs do not build the same file or work in the same folder at once."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from qat.errors import ConfigError
from qat.files import explain_write


@contextmanager
def file_lock(path: str | Path) -> Iterator[None]:
    """Hold an exclusive lock for `path` until the block ends; waits for another process that holds it.

    The lock is on a hidden file beside `path`, which stays. The system releases it when a process dies.

    Raises:
        WriteError: the folder cannot be written.
    """
    target = Path(path)
    with _open(target.with_name(f".{target.name}.lock")) as handle:
        _acquire(handle)
        try:
            yield
        finally:
            _release(handle)


def hold_folder(folder: str | Path) -> IO[bytes]:
    """Let no other process work in `folder` until the returned file is closed or this process has ended, killed or not.

    The lock is on the hidden file `.lock` in it, which stays and says who held it last. A process that holds the
    folder may hold it again; processes that it starts do not hold it.

    Raises:
        ConfigError: another process holds it.
        WriteError: the folder cannot be written.
    """
    path = Path(folder) / ".lock"
    handle = _open(path)
    if not _claim(handle):
        handle.close()
        owner = path.read_text().strip() or "another process"
        raise ConfigError(
            f"{folder} is in use by {owner}. Wait until it has ended, stop it, or choose another output folder."
        )
    with explain_write(path):
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        handle.flush()
    return handle


def _open(path: Path) -> IO[bytes]:
    with explain_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+b")


if sys.platform == "win32":
    import msvcrt

    def _acquire(handle: IO[bytes]) -> None:
        while not _claim(handle):
            time.sleep(0.1)

    def _release(handle: IO[bytes]) -> None:
        handle.seek(0)
        msvcrt.locking(handle.fileno(), msvcrt.LK_UNLCK, 1)

    def _claim(handle: IO[bytes]) -> bool:
        try:
            handle.seek(0)
            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

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

    def _claim(handle: IO[bytes]) -> bool:
        # Not flock, which workers forked by a killed process would go on holding.
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True
