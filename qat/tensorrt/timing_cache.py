"""The timing cache: measured tactics, kept between builds.

A cache belongs to one TensorRT version and one GPU. Both go into the file's name, so that versions and machines
that share a folder never reject or overwrite each other's.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from qat.files import atomic_write
from qat.locks import file_lock
from qat.tensorrt.api import Library, gpu_name

logger = logging.getLogger("qat.tensorrt")


def cache_path(path: str | Path, library: Library) -> Path:
    """The file really used for `--timingCacheFile=path`: `t.cache` -> `t.tensorrt-10.16.1.11-NVIDIA-L4-8.9.cache`."""
    base = Path(path)
    gpu = re.sub(r"[^A-Za-z0-9.]+", "-", gpu_name() or "no-gpu").strip("-")
    return base.with_name(f"{base.stem}.{library.name}-{library.version}-{gpu}{base.suffix}")


def attach_timing_cache(library: Library, config: Any, path: str | Path) -> bool:
    """Load the cache into a builder configuration; an unreadable one is replaced by an empty one.

    Returns:
        False for TensorRT for RTX, which measures nothing while building and has no timing cache.
    """
    if library.is_rtx:
        logger.warning("The timing cache '%s' is not used: TensorRT for RTX measures nothing while building.", path)
        return False
    file = cache_path(path, library)
    with file_lock(file):
        data = file.read_bytes() if file.exists() else b""
    cache = config.create_timing_cache(data)
    if not cache or not config.set_timing_cache(cache, False):
        logger.warning("TensorRT refuses the timing cache '%s' (damaged?); starting a new one.", file)
        config.set_timing_cache(config.create_timing_cache(b""), False)
    return True


def store_timing_cache(library: Library, config: Any, path: str | Path) -> None:
    """Merge the cache of a finished build into the file, keeping what other processes stored in the meantime."""
    file = cache_path(path, library)
    mine = config.get_timing_cache()
    with file_lock(file):
        if file.exists():
            theirs = config.create_timing_cache(file.read_bytes())
            if theirs:
                mine.combine(theirs, False)
        with atomic_write(file) as temporary:
            temporary.write_bytes(bytes(mine.serialize()))
