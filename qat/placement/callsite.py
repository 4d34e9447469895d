"""Finding the expression in a module's source that called a torch function."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from qat.placement.graph import Location

_TORCH = str(torch.__file__).removesuffix("__init__.py")
_DISPATCH = ("overrides.py", "functional.py", "nn/functional.py", "_tensor.py", "_jit_internal.py", "utils/_contextlib")
_SKIPPED = (__file__.removesuffix("callsite.py"), *(_TORCH + name for name in _DISPATCH))


@dataclass(frozen=True)
class Caller:
    """Who called a function.

    Attributes:
        module: whose forward it is part of; None outside of any.
        location: the expression; None where it can not be edited for this one module.
        obstacle: why there is no location.
    """

    module: nn.Module | None
    location: Location | None = None
    obstacle: str = ""


def find_caller(modules: Container[nn.Module], function: str) -> Caller:
    """Caller of the torch function that is being intercepted now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    location: Location | None = None
    while frame is not None:
        span = _span(frame)
        while frame.f_back is not None and _contains(frame.f_back.f_code, frame.f_code):
            frame = frame.f_back  # from a comprehension or local function to the function it is written in
        module = _self(frame)
        known = isinstance(module, nn.Module) and module in modules
        scope = _method_name(module, frame.f_code) if known else _function_name(frame)
        if span is None or scope is None:
            obstacle = f"'{function}' is called in {frame.f_code.co_name}(), whose source is not at hand"
            return Caller(_first_module(frame, modules), None, obstacle)
        location = Location(scope, span, location)
        if known:
            return Caller(module, location)
        frame = frame.f_back
    return Caller(None)


def _self(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _first_module(frame: FrameType | None, modules: Container[nn.Module]) -> nn.Module | None:
    while frame is not None:
        module = _self(frame)
        if isinstance(module, nn.Module) and module in modules:
            return module
        frame = frame.f_back
    return None


def _contains(code: CodeType, inner: CodeType) -> bool:
    return any(c is inner or _contains(c, inner) for c in code.co_consts if isinstance(c, CodeType))


def _span(frame: FrameType) -> tuple[int, int, int, int] | None:
    """Where the running instruction comes from; None where Python runs with -X no_debug_ranges."""
    line, end_line, column, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return line, end_line, column, end_column


def _function_name(frame: FrameType) -> str | None:
    """Name of a function that its module has under its own name, undecorated."""
    function = frame.f_globals.get(frame.f_code.co_name)
    if getattr(function, "__code__", None) is not frame.f_code:
        return None
    return f"{frame.f_globals['__name__']}:{frame.f_code.co_name}"


_methods: dict[type, dict[CodeType, str]] = {}


def _method_name(module: nn.Module, code: CodeType) -> str | None:
    """Name under which the module's class finds this very code: not if it is overridden, or decorated."""
    kind = type(module)
    if kind not in _methods:
        pairs = ((getattr(method_of(kind, name), "__code__", None), name) for name in dir(kind))
        _methods[kind] = {found: name for found, name in pairs if found is not None}
    return _methods[kind].get(code)


def method_of(kind: type, name: str) -> Any:
    """A class's attribute; behind the wrapper, where `__init_subclass__` wraps the methods of every subclass by itself.

    The layers of transformers are such: an edited method in a subclass is wrapped again, and nothing is lost.
    """
    function = getattr(kind, name, None)
    inner = getattr(function, "__wrapped__", None)
    if inner is None or not hasattr(kind.__init_subclass__, "__func__"):
        return function
    again = vars(type(kind.__name__, (kind,), {name: inner, "__module__": kind.__module__}))[name]
    return inner if getattr(again, "__wrapped__", None) is inner else function
