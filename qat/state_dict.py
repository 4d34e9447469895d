"""Reading a state dict from a file or URL, and loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat.errors import ConfigError


def read_checkpoint(source: str | Path) -> dict[str, Any]:
    """State dict from a file or URL, without running any code in it.

    Takes a bare state dict, or one under "model", "state_dict" or "model_state_dict"; a "module." prefix is dropped.

    Raises:
        ConfigError: not there, not readable, or no state dict in it.
    """
    text = str(source)
    try:
        if text.startswith(("http://", "https://")):
            content = torch.hub.load_state_dict_from_url(text, map_location="cpu", weights_only=True)
        else:
            content = torch.load(text, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"checkpoint {text} does not exist. Check model.checkpoint.") from error
    except Exception as error:
        raise ConfigError(f"checkpoint {text} cannot be read: {error}") from error
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not any(isinstance(value, torch.Tensor) for value in content.values()):
        raise ConfigError(f"checkpoint {text} holds no state dict. Save model.state_dict().")
    return {str(key).removeprefix("module."): value for key, value in content.items()}


def load_weights(model: nn.Module, state: dict[str, Any], source: str | Path) -> None:
    """Load every weight; ConfigError names the first keys that are missing, unknown or of another shape."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"checkpoint {source} does not fit {type(model).__name__}: {str(error)[:600]}") from error
