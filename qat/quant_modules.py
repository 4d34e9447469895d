"""Swap torch.nn classes for quant classes while a model is built.

The swap is global to the process and changes attributes of `torch.nn` only: code that imported a class by name
before (`from torch.nn import Conv2d`) keeps the float class, and an existing model is converted with
`qat.quantize_` instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from qat.errors import ConfigError
from qat.nn import QUANT_CLASSES

__all__ = ["CustomModules", "deactivate", "enable", "initialize"]
CustomModules = Sequence[tuple[Any, str, type[torch.nn.Module]]]
"""Entries (namespace, attribute name, class to put there), for example (torch.nn, "Linear", MyQuantLinear)."""

_Slot = tuple[Any, str]

_KNOWN = {cls.__name__: quant for cls, quant in QUANT_CLASSES.items()}
# Max pooling passes the scale of its input through and InstanceNorm has no INT8 kernel: only on request.
_DEFAULT = {name: quant for name, quant in _KNOWN.items() if not name.startswith(("MaxPool", "InstanceNorm"))}

_originals: dict[_Slot, Any] = {}


def initialize(
    float_module_list: Sequence[str] | None = None, custom_quant_modules: CustomModules | None = None
) -> None:
    """Put quant classes in the place of Conv, ConvTranspose, Linear, LSTM, LSTMCell and average pooling of torch.nn.

    Each call starts from the original classes, so its arguments hold whatever was swapped before.

    Args:
        float_module_list: names that stay float, such as "Conv2d".
        custom_quant_modules: further swaps (namespace, name, class), applied last, so they win over the list.

    Raises:
        ConfigError: a name in the list that is not a torch.nn class with a quant class.
        TypeError: an entry of the custom map that is not (namespace, name, class).
        AttributeError: a namespace of the custom map without that name.
    """
    swaps = _defaults_without(float_module_list or ()) | _custom(custom_quant_modules or ())
    deactivate()
    _apply(swaps)


def deactivate() -> None:
    """Put every original class back, however often `initialize` was called."""
    for (namespace, name), original in _originals.items():
        setattr(namespace, name, original)
    _originals.clear()


@contextmanager
def enable(
    float_module_list: Sequence[str] | None = None, custom_quant_modules: CustomModules | None = None
) -> Iterator[None]:
    """`initialize` for the length of a with block; at its end the classes are what they were at its start."""
    before = {(namespace, name): getattr(namespace, name) for namespace, name in _originals}
    initialize(float_module_list, custom_quant_modules)
    try:
        yield
    finally:
        deactivate()
        _apply(before)


def _apply(swaps: dict[_Slot, Any]) -> None:
    for (namespace, name), replacement in swaps.items():
        _originals[namespace, name] = getattr(namespace, name)
        setattr(namespace, name, replacement)


def _defaults_without(float_names: Sequence[str]) -> dict[_Slot, Any]:
    if isinstance(float_names, str):
        raise ConfigError(f"float_module_list={float_names!r} is one string. Use a list: [{float_names!r}].")
    for name in float_names:
        if name not in _KNOWN:
            near = difflib.get_close_matches(str(name), _KNOWN, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(_KNOWN)}."
            raise ConfigError(f"float_module_list names {name!r}, which no quant class replaces. {hint}")
    return {(torch.nn, name): quant for name, quant in _DEFAULT.items() if name not in float_names}


def _custom(entries: CustomModules) -> dict[_Slot, Any]:
    swaps: dict[_Slot, Any] = {}
    for entry in entries:
        if not (isinstance(entry, tuple | list) and len(entry) == 3 and isinstance(entry[1], str)):
            raise TypeError(
                f"custom_quant_modules holds {entry!r}. Each entry is (namespace, name, class), for example "
                "(torch.nn, 'Linear', MyQuantLinear)."
            )
        namespace, name, replacement = entry
        if not isinstance(replacement, type):
            raise TypeError(f"custom_quant_modules gives {replacement!r} for {name!r}, which is not a class.")
        if not hasattr(namespace, name):
            raise AttributeError(
                f"custom_quant_modules names {name!r}, but {getattr(namespace, '__name__', namespace)} has no such "
                "attribute to replace."
            )
        swaps[namespace, name] = replacement
    return swaps
