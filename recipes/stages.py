"""Keeping the parts of a run apart on disk, so that a run can be repeated, resumed and never mixed with another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qat.errors import ConfigError
from qat.files import write_json

SETTINGS = "settings.json"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ, as "key: old -> new"."""
    found = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a} -> {b}")
    return found


def claim(folder: Path, settings: Mapping[str, Any], write: bool) -> None:
    """Mark `folder` as holding the results of `settings`.

    Args:
        write: False in all processes but the main one.

    Raises:
        ConfigError: it holds the results of other settings; the message says which keys differ.
    """
    path = folder / SETTINGS
    if path.exists():
        try:
            old = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(
                f"{path} is not readable JSON ({error}). Remove the folder {folder} to start over."
            ) from error
        changed = differences(old, settings)
        if changed:
            raise ConfigError(
                f"{folder} holds a run with other settings ({'; '.join(changed[:5])}). "
                "Choose another --output_dir, or remove that folder to start over."
            )
    elif write:
        write_json(path, settings)
