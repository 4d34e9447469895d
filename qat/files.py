"""Writing files so that a killed run leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qat.errors import WriteError

_REASONS = {
    errno.ENOSPC: "the disk is full. Make room",
    errno.EDQUOT: "the disk quota is used up. Make room",
    errno.EFBIG: "the file would be larger than this process may write. Raise that limit (ulimit -f)",
    errno.EROFS: "the file system is read-only. Choose another folder",
    errno.EACCES: "this user may not write there. Choose another folder, or change its permissions",
    errno.EPERM: "this user may not write there. Choose another folder, or change its permissions",
    errno.ENOTDIR: "a part of the path is a file. Choose another folder",
    errno.EEXIST: "a part of the path is a file. Choose another folder",
    errno.EIO: "the disk reports an error. Check it, or choose another folder",
}


@contextmanager
def explain_write(path: str | Path) -> Iterator[None]:
    """Turn what the system says about a file or folder that cannot be written into a sentence.

    Raises:
        WriteError: no space, no permission, a read-only or a failing disk.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = None if isinstance(error, WriteError) else _why_not_written(error, Path(path))
        if reason is None:
            raise
        raise WriteError(
            f"{path} cannot be written: {reason}, and run the same command again: what was written before is whole."
        ) from error


def _why_not_written(error: OSError | RuntimeError, path: Path) -> str | None:
    if isinstance(error, OSError):
        named = Path(error.filename) if isinstance(error.filename, str) else path
        ours = path.is_relative_to(named) or named.parent == path.parent
        return _REASONS.get(error.errno or 0) if ours else None
    if "inline_container.cc" not in str(error):
        return None
    # torch's writer hides the system's error, or says only that its position is not what it should be.
    hidden = error.__context__
    found = _REASONS.get(hidden.errno or 0) if isinstance(hidden, OSError) else None
    return found or "the disk is full or failing. Make room"


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it is flushed to disk and renamed to `path`, on error removed.

    Raises:
        WriteError: the folder or the file cannot be written; an older file of that name is untouched.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with explain_write(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb+") as written:
                os.fsync(written.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: str | Path) -> None:
    """Delete the temporary files that killed processes left in a folder; those of living ones stay."""
    if os.name != "posix":
        return  # elsewhere asking whether a process lives would end it
    for path in Path(folder).glob(".*.tmp"):
        named = re.fullmatch(r"\..+\.(\d+)\.tmp", path.name)
        if named and not _alive(int(named[1])):
            path.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_json(path: str | Path, value: Any) -> None:
    """Write value as indented JSON, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
