"""Checkpoints of a training run: written whole or not at all, read without running code from the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat.errors import ConfigError
from qat.files import atomic_write

FORMAT = 1
BEST = "best.pt"
LAST = "last.pt"


def save_checkpoint(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write values atomically: tensors, numbers, strings, None, and dicts, lists and tuples of these.

    Raises:
        WriteError: the file cannot be written; an older one of that name is untouched.
    """
    with atomic_write(path) as temporary:
        torch.save({"format": FORMAT, **values}, temporary)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The values of a checkpoint, tensors on the CPU.

    Raises:
        ConfigError: the file is absent, damaged or not a checkpoint of this library.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"checkpoint {file} does not exist. Give the path of a best.pt or last.pt.")
    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises half a dozen types here, by where the file is cut.
        raise ConfigError(
            f"checkpoint {file} cannot be read ({type(error).__name__}). It is damaged or not a checkpoint: restore "
            "it from a copy, or delete it to train from the start."
        ) from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(
            f"checkpoint {file} is not one that this version of qat.training wrote (format {FORMAT}). "
            "Give a best.pt or last.pt of this version, or delete it to train from the start."
        )
    return values


def load_model(model: nn.Module, values: Mapping[str, Any], path: str | Path) -> None:
    """Load the weights of a checkpoint into model.

    Raises:
        ConfigError: the model is not the one that the checkpoint was made of.
    """
    try:
        model.load_state_dict(values["model"])
    except (RuntimeError, KeyError) as error:
        raise ConfigError(
            f"checkpoint {path} does not fit this model: {error}. Build the model as it was when the checkpoint was "
            "written, quantizers included, or use another output folder."
        ) from error


def load_best(model: nn.Module, output_dir: str | Path) -> dict[str, float]:
    """Load the best weights of the run in `output_dir` into model.

    Returns:
        The metrics of these weights.

    Raises:
        ConfigError: there is no usable checkpoint, or it does not fit the model.
    """
    path = Path(output_dir) / BEST
    values = load_checkpoint(path)
    load_model(model, values, path)
    metrics: dict[str, float] = values["metrics"]
    return metrics


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], path: str | Path) -> None:
    """Refuse to continue a run with other settings than it began with.

    Raises:
        ConfigError: names each differing field with both values.
    """
    differing = [
        f"{name} was {saved.get(name)!r} and is now {current.get(name)!r}"
        for name in {**saved, **current}
        if saved.get(name) != current.get(name)
    ]
    if differing:
        raise ConfigError(
            f"the run in {Path(path).parent} cannot be resumed: {'; '.join(differing)}. Use the same values to "
            "continue it, or another output folder to start a new run."
        )
