"""Weights of convolutions and linear layers by input channel and by output channel."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

Side = Literal["input", "output"]


def channel_range(layer: nn.Module, side: Side, weight: Tensor) -> Tensor:
    """Largest magnitude of a layer's weight for each input or output channel, shape (channels,)."""
    grouped = _grouped(layer, weight)
    kept = _kept(layer, side)
    return grouped.abs().amax([d for d in range(grouped.dim()) if d not in kept]).flatten()


def multiply_channels(layer: nn.Module, side: Side, weight: Tensor, factor: Tensor) -> Tensor:
    """The weight with each input or output channel times its factor; `factor` has shape (channels,)."""
    grouped = _grouped(layer, weight)
    kept = _kept(layer, side)
    shape = [size if d in kept else 1 for d, size in enumerate(grouped.shape)]
    return (grouped * factor.reshape(shape)).reshape(weight.shape)


def channels(layer: nn.Module, side: Side) -> int:
    """Number of input or output channels."""
    m: Any = layer
    names = ("in_features", "out_features") if isinstance(layer, nn.Linear) else ("in_channels", "out_channels")
    return int(getattr(m, names[side == "output"]))


def _transposed(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.conv._ConvTransposeNd)


def _grouped(layer: nn.Module, weight: Tensor) -> Tensor:
    """(groups, first / groups, second, ...): of (O, I / groups, ...), or transposed (I, O / groups, ...)."""
    groups = getattr(layer, "groups", 1)
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])


def _kept(layer: nn.Module, side: Side) -> tuple[int, int]:
    """The dimensions of the grouped weight that make up the channels of a side."""
    return (0, 1) if (side == "output") is not _transposed(layer) else (0, 2)
