"""torchvision classifiers: random, pretrained, or from a checkpoint file or URL."""

from __future__ import annotations

import difflib

import torchvision
from torch import nn

from qat.errors import ConfigError
from qat.state_dict import load_weights, read_checkpoint
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
