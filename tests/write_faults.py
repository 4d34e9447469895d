"""A disk that is full and a folder that may not be written, for real."""

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to let a file grow beyond `size` bytes, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextmanager
def read_only_folder() -> Iterator[Path]:
    """A folder that may be read and not be written, also where the tests run as root; old.json is in it."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(parent) / "run"
        folder.mkdir()
        (folder / "old.json").write_text("1")
        folder.chmod(0o555)
        if root:
            os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)
