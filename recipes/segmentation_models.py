"""Segmentation networks: those of segmentation-models-pytorch with any of its encoders, and torchvision's."""

from __future__ import annotations

import difflib
from inspect import signature
from typing import Any

import torchvision
from torch import Tensor, nn

from qat.errors import ConfigError
from qat.state_dict import load_weights, read_checkpoint
from recipes.segmentation_config import NetworkConfig

INSTALL = "Install it with the extra: pip install 'qat[segmentation]'."


class LogitsOnly(nn.Module):
    """torchvision's segmentation network, which returns a dict, with its "out" as the only output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (N, classes, H, W)."""
        logits: Tensor = self.model(x)["out"]
        return logits


def build_network(config: NetworkConfig, channels: int, outputs: int) -> nn.Module:
    """The network that `config` names: images (N, channels, H, W) to logits (N, outputs, H, W).

    Raises:
        ConfigError: unknown network, encoder or option, weights that cannot be had, a checkpoint that does not fit, or
            segmentation-models-pytorch is not installed.
    """
    known = torchvision.models.list_models(module=torchvision.models.segmentation)
    if config.name in known:
        model = _torchvision(config, channels, outputs)
    else:
        model = _library(config, channels, outputs, known)
    if config.checkpoint is not None:
        load_weights(model, read_checkpoint(config.checkpoint), config.checkpoint)
    return model


def _torchvision(config: NetworkConfig, channels: int, outputs: int) -> nn.Module:
    if channels != 3:
        raise ConfigError(f"data.channels={channels}: torchvision's {config.name} takes 3. Use data.channels=3.")
    options: dict[str, Any] = {"weights": None, "weights_backbone": config.weights, **config.options}
    try:
        return LogitsOnly(torchvision.models.get_model(config.name, num_classes=outputs, **options))
    except (TypeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"model.weights or model.options do not suit {config.name}: {error}") from error


def _library(config: NetworkConfig, channels: int, outputs: int, others: list[str]) -> nn.Module:
    try:
        import segmentation_models_pytorch as smp
    except ImportError as error:
        raise ConfigError(f"model.name={config.name!r} needs segmentation-models-pytorch. {INSTALL}") from error
    known = list(smp.MODEL_ARCHITECTURES_MAPPING)
    if config.name not in known:
        near = difflib.get_close_matches(config.name, [*known, *others], n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join([*known, *others])}."
        raise ConfigError(f"model.name={config.name!r} is not a segmentation network. {hint}")
    _check_options(config, smp.MODEL_ARCHITECTURES_MAPPING[config.name])
    try:
        model: nn.Module = smp.create_model(
            config.name,
            config.encoder,
            encoder_weights=config.weights,
            in_channels=channels,
            classes=outputs,
            **config.options,
        )
    except (KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"model.encoder={config.encoder!r}, model.weights={config.weights!r} or model.options={config.options} do "
            f"not suit {config.name}: {error}"
        ) from error
    return model


def _check_options(config: NetworkConfig, network: type) -> None:
    """Refuse options that the constructor would swallow; those of timm's encoders ("tu-...") it passes on."""
    parameters = signature(network.__init__).parameters.values()  # type: ignore[misc]
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    unknown = sorted(set(config.options) - set(known))
    if unknown and not config.encoder.startswith("tu-"):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
        raise ConfigError(f"model.options={config.options}: {config.name} has no option {unknown[0]!r}. {hint}")
