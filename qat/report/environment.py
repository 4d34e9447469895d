"""What produced a number: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "segmentation-models-pytorch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "accelerate",
    "tensorrt",
    "tensorrt-rtx",
)
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")


def environment() -> dict[str, Any]:
    """Versions of packages, CPU with the flags that change ONNX Runtime's numbers, GPU, commit, time."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cpu, flags = _cpu()
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu": cpu,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "gpu": gpus,
        "cuda": torch.version.cuda if gpus else None,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> tuple[str, set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor(), set()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    return fields.get("model name", platform.processor()), set(fields.get("flags", "").split())


_MADE_BY_SCRIPTS = (":(top,exclude)results", ":(top,exclude)docs/*.png")


def _commit() -> str:
    """Commit of this checkout, "-dirty" appended where its code is edited; QAT_COMMIT where no history travelled along.

    Results and pictures that scripts write are not code: the second row of a table has the commit of the first.
    """
    try:
        edited = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *_MADE_BY_SCRIPTS)
        return _git("rev-parse", "--short=12", "HEAD") + ("-dirty" if edited else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("QAT_COMMIT", "unknown")


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
