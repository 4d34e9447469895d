"""Putting a submodule's call around an expression in a module's own method.

A functional operator has no module to convert: in `out += identity` the quantizer must stand inside the forward. The
class of that one instance becomes a subclass whose method is compiled again from its own source, with
`self._add_quantizer(identity)` in the place of `identity`. All else is the user's code: control flow, `self.training`,
line numbers in tracebacks, closures, isinstance. Instances with equal edits share one class.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import importlib
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from qat.errors import ConfigError
from qat.placement.callsite import method_of
from qat.placement.graph import Location
from qat.placement.source import Edit, SourceObstacleError, change, definition_of

_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


def edit_obstacle(module: nn.Module, edit: Edit) -> str | None:
    """Why the edit cannot be made, to complete "... stays float because"; None where it can."""
    try:
        for function, edits, is_method in _plan(type(module), (edit,)).values():
            change(definition_of(function.__code__), edits, is_method)
    except SourceObstacleError as obstacle:
        return str(obstacle)
    return None


def apply_edits(module: nn.Module, edits: Iterable[Edit]) -> None:
    """Give the module a class with the edited methods; its submodules `edit.attribute` must exist by the first call.

    Raises:
        ConfigError: an edit that `edit_obstacle` has a reason against.
    """
    module.__class__ = _edited_class(type(module), tuple(sorted(edits, key=repr)))


_Work = tuple[Any, list[Edit], bool]
"""A function, its edits, and whether it is a method already."""


def _plan(base: type[nn.Module], edits: Iterable[Edit]) -> dict[str, _Work]:
    """New attributes of the class: edited methods, and edited copies of functions that methods call.

    Such a copy becomes a method, and the call becomes `self.<copy>(...)`: each place that calls it has its own.
    """
    plan: dict[str, _Work] = {}

    def visit(name: str, function: Any, pairs: list[tuple[Location, Edit]], is_method: bool) -> None:
        own = [replace(edit, location=place) for place, edit in pairs if place.inside is None]
        plan[name] = (function, own, is_method)
        called: dict[tuple[Any, str], list[tuple[Location, Edit]]] = defaultdict(list)
        for place, edit in pairs:
            if place.inside is not None:
                called[place.span, place.inside.scope].append((place.inside, edit))
        for (span, scope), inner in called.items():
            package, _, short = scope.partition(":")
            copy_name = f"_{short.strip('_')}_{len(plan)}"
            own.append(Edit(Location(name, span), short.strip("_"), False, "callee", 0, copy_name))
            visit(copy_name, getattr(sys.modules[package], short), inner, False)

    methods: dict[str, list[tuple[Location, Edit]]] = defaultdict(list)
    for edit in edits:
        methods[edit.location.scope].append((edit.location, edit))
    for method, pairs in methods.items():
        visit(method, method_of(base, method), pairs, True)
    return plan


def _compiled(function: Any, edits: list[Edit], is_method: bool, defining: str) -> FunctionType:
    """The function with its edits, as a method, over the same globals, closure and defaults."""
    original: CodeType = function.__code__
    definition = change(definition_of(original), edits, is_method)
    # Inside a class of the same name, private names are mangled and super() finds its class as in the original; a
    # function around it makes the original's free variables free here too.
    free = [name for name in original.co_freevars if name != "__class__"]
    body: ast.stmt = ast.ClassDef(defining, [], [], [definition], [])
    arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
    around = ast.FunctionDef("around", arguments, [body], [])
    tree = ast.fix_missing_locations(ast.Module([around], []))
    flags = original.co_flags & _FUTURE
    code = _find(compile(tree, original.co_filename, "exec", flags, dont_inherit=True), original.co_name)
    cells = dict(zip(original.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, dict(function.__annotations__)
    made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return made


def _find(code: CodeType, name: str) -> CodeType:
    """The code of the method inside the compiled module: around -> class -> method."""
    for wanted in ("around", None, name):
        inner = [c for c in code.co_consts if isinstance(c, CodeType)]
        code = next(c for c in inner if wanted is None or c.co_name == wanted)
    return code


_classes: dict[tuple[type[nn.Module], tuple[Edit, ...]], type[nn.Module]] = {}


def _digest(base: type[nn.Module], edits: tuple[Edit, ...]) -> str:
    functions = (function for function, _, _ in _plan(base, edits).values())
    text = "".join(ast.dump(definition_of(function.__code__)) for function in functions)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _edited_class(base: type[nn.Module], edits: tuple[Edit, ...]) -> type[nn.Module]:
    key = (base, edits)
    if key in _classes:
        return _classes[key]
    body: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    for name, (function, own, is_method) in _plan(base, edits).items():
        owner = next((cls.__name__ for cls in base.__mro__ if name in vars(cls)), base.__name__)
        try:
            body[name] = _compiled(function, own, is_method, owner)
        except SourceObstacleError as obstacle:
            raise ConfigError(f"{base.__name__}.{name} cannot be given quantizers: {obstacle}.") from obstacle
    digest = _digest(base, edits)

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _new_edited, (base, edits, digest), object.__reduce_ex__(self, 2)[2]

    body["__reduce_ex__"] = reduce
    _classes[key] = type(f"Quant{base.__name__}", (base,), body)
    return _classes[key]


def _new_edited(base: type[nn.Module], edits: tuple[Edit, ...], digest: str) -> nn.Module:
    """Unpickle: the same class again, from the source as it is now."""
    for edit in edits:
        _import_scopes(edit.location)
    if _digest(base, edits) != digest:
        raise ConfigError(
            f"the source of {base.__name__} has changed since this model was pickled, so its quantizers cannot be put "
            "back. Build and prepare the model again and load its state dict."
        )
    cls = _edited_class(base, edits)
    return cls.__new__(cls)


def _import_scopes(location: Location) -> None:
    if location.inside is not None:
        importlib.import_module(location.inside.scope.partition(":")[0])
        _import_scopes(location.inside)
