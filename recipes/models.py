"""torchvision classifiers: random, pretrained, or from a checkpoint file or URL."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from qat.errors import ConfigError
from recipes.config import ModelConfig

INPUT_CHANNELS = 3


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """The network with `num_classes` outputs, its weights from `config.weights` or `config.checkpoint` if given.

    Raises:
        ConfigError: unknown network or weights, weights that cannot be had, or a checkpoint that does not fit.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if config.name not in known:
        near = difflib.get_close_matches(config.name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "See torchvision.models.list_models()."
        raise ConfigError(f"model.name={config.name!r} is not a torchvision classifier. {hint}")
    extra = {"init_weights": True} if config.name in ("googlenet", "inception_v3") else {}
    try:
        model: nn.Module = torchvision.models.get_model(
            config.name, weights=None, num_classes=num_classes, **{**extra, **config.options}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.options={config.options} do not suit {config.name}: {error}") from error
    _undo_strides(model, config.undo_strides)
    if config.checkpoint is not None:
        load_weights(model, read_checkpoint(config.checkpoint), config.checkpoint)
    elif config.weights is not None:
        _load_pretrained(model, config)
    return model


def _undo_strides(model: nn.Module, count: int) -> None:
    """Let the first `count` downsampling layers keep the resolution: stride 1, and no pooling."""
    strided = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.MaxPool2d) and module.stride in (2, (2, 2))
    ]
    if count > len(strided):
        raise ConfigError(f"model.undo_strides={count}, but the network downsamples {len(strided)} times. Use less.")
    for name, module in strided[:count]:
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
        else:
            model.set_submodule(name, nn.Identity())


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


def _load_pretrained(model: nn.Module, config: ModelConfig) -> None:
    """torchvision's weights; layers of another shape (a head for other classes) keep their random ones."""
    try:
        weights = torchvision.models.get_model_weights(config.name)[config.weights]
    except KeyError as error:
        names = [w.name for w in torchvision.models.get_model_weights(config.name)]
        raise ConfigError(f"model.weights={config.weights!r}: {config.name} has {names} and 'DEFAULT'.") from error
    try:
        state = weights.get_state_dict(progress=True, check_hash=True)
    except OSError as error:
        raise ConfigError(
            f"model.weights={config.weights!r} could not be downloaded: {error}. Give model.checkpoint=FILE instead."
        ) from error
    own = model.state_dict()
    model.load_state_dict({**own, **{k: v for k, v in state.items() if k in own and own[k].shape == v.shape}})
