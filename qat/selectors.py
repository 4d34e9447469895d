"""Choosing layers by name glob, module class or predicate."""

from __future__ import annotations

import difflib
import fnmatch
import glob
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from qat.errors import ConfigError

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A name glob ("layer1.*"), a module class, or a function of (name, module)."""


def as_selectors(value: Selector | Iterable[Selector]) -> list[Selector]:
    """One selector or several, as a list."""
    if isinstance(value, str | type) or callable(value):
        return [value]
    return list(value)


def exact(name: str) -> str:
    """The glob that matches this name and no other, whatever characters it has."""
    return glob.escape(name)


def match_selector(selectors: Iterable[Selector], name: str, module: nn.Module) -> str | None:
    """The first selector that takes this module, in words, or None."""
    for selector in selectors:
        if isinstance(selector, str):
            if fnmatch.fnmatchcase(name, selector):
                return repr(selector)
        elif isinstance(selector, type):
            if isinstance(module, selector):
                return selector.__name__
        elif selector(name, module):
            return getattr(selector, "__name__", "predicate")
    return None


def check_globs(names: Sequence[str], selectors: Iterable[Selector], model: str) -> None:
    """Refuse a glob that matches none of the names.

    Raises:
        ConfigError: with the nearest name.
    """
    for selector in selectors:
        if isinstance(selector, str) and not any(fnmatch.fnmatchcase(name, selector) for name in names):
            near = difflib.get_close_matches(selector, names, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else "See the names in model.named_modules()."
            raise ConfigError(f"layer name {selector!r} matches nothing in {model}. {hint}")
