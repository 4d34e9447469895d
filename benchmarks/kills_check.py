"""What a killed run left on disk: whether every file is whole, and whether a finished run equals one never killed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
import yaml
from PIL import Image

from qat.errors import EngineError
from qat.tensorrt.store import read_manifest

VARIES = ("seconds", "build_seconds", "engine_bytes", "output_dir", "environment")
"""Keys of results and histories that differ between two runs that did the same."""


def _load_checkpoint(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_image(path: Path) -> None:
    with Image.open(path) as image:
        image.load()


READERS: Mapping[str, Callable[[Path], Any]] = {
    ".pt": _load_checkpoint,
    ".json": lambda path: json.loads(path.read_text()),
    ".yaml": lambda path: yaml.safe_load(path.read_text()),
    ".onnx": lambda path: onnx.checker.check_model(str(path), full_check=True),
    ".png": _check_image,
    ".engine": lambda path: path.stat().st_size or 1 / 0,
}


def files_of(folder: Path) -> list[Path]:
    """What the run wrote under its final name, without logs and locks."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(path for path in found if "tfevents" not in path.name)


def temporaries(folder: Path) -> list[Path]:
    """Files of writes that did not end."""
    return sorted(folder.rglob(".*.tmp"))


def damaged(folder: Path) -> list[str]:
    """A sentence for every file that does not load."""
    found = []
    for path in files_of(folder):
        try:
            READERS[path.suffix](path)
        except Exception as error:
            found.append(f"{path.relative_to(folder)}: {type(error).__name__}: {error}"[:300])
    return found


def steps_done(folder: Path) -> dict[str, int]:
    """Optimizer steps in the last checkpoint of each training."""
    parts = ("float", "qat/seed0")
    return {part: _load_checkpoint(folder / part / "last.pt")["position"]["step"] for part in parts if
            (folder / part / "last.pt").exists()}  # fmt: skip


def _differences(old: Any, new: Any, where: str) -> list[str]:
    """Where two nested values differ; tensors bit by bit."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [key for key in {**old, **new} if key not in VARIES]
        return [d for key in keys for d in _differences(old.get(key), new.get(key), f"{where}.{key}")]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        return [d for i, pair in enumerate(zip(old, new, strict=True)) for d in _differences(*pair, f"{where}[{i}]")]
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return [] if old.dtype == new.dtype and torch.equal(old, new) else [f"{where}: tensors differ"]
    return [] if old == new else [f"{where}: {str(old)[:60]} -> {str(new)[:60]}"]


def differences(whole: Path, broken: Path) -> list[str]:
    """How a run that was killed and went on differs from one never killed, in files, weights and numbers."""
    names = [path.relative_to(whole) for path in files_of(whole)]
    found = [f"{path} is left over" for path in temporaries(broken)]
    found += [
        f"{path.relative_to(broken)} is there too" for path in files_of(broken) if path.relative_to(broken) not in names
    ]
    for name in names:
        if not (broken / name).exists():
            found.append(f"{name} is missing")
        elif name.suffix in (".pt", ".json") and ".engine" not in name.suffixes:
            found += _differences(READERS[name.suffix](whole / name), READERS[name.suffix](broken / name), str(name))
        elif name.suffix == ".onnx" and _sha256(whole / name) != _sha256(broken / name):
            found.append(f"{name}: bytes differ")
        elif name.suffix == ".engine":
            found += _engine_fits(broken / name)
    return found


def _engine_fits(path: Path) -> list[str]:
    try:
        read_manifest(path)
    except EngineError as error:
        return [str(error)]
    return []


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
