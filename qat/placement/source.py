"""Changing expressions in the syntax tree of a function."""

from __future__ import annotations

import ast
import copy
import linecache
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, Literal

from qat.placement.graph import Key, Location

OWNER = "_qat_owner"
"""First argument of a function that became a method."""


@dataclass(frozen=True)
class Edit:
    """One change of an expression.

    Attributes:
        location: the call or operator.
        function: its name as torch knows it, without underscores at its ends.
        method: called as a method of its first tensor, or as an operator.
        what: put `self.<attribute>(...)` around an operand or the result, or call `self.<attribute>` instead.
        key: which operand; the position counts a method's receiver.
        attribute: name of the submodule.
        by_run: the submodule is a QuantRuns, which is told where the runs of the expression begin.
    """

    location: Location
    function: str
    method: bool
    what: Literal["operand", "result", "callee"]
    key: Key
    attribute: str
    by_run: bool = False


class SourceObstacleError(Exception):
    """The source does not have the form that an edit needs."""


@lru_cache(maxsize=64)
def _parsed(filename: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(filename)))


def definition_of(code: CodeType) -> ast.FunctionDef:
    """Syntax tree of a function, from its file."""
    try:
        tree = _parsed(code.co_filename)
    except SyntaxError as error:
        raise SourceObstacleError(f"the source of {code.co_name} cannot be read") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise SourceObstacleError(f"the source of {code.co_name} is not at hand")


def change(definition: ast.FunctionDef, edits: list[Edit], is_method: bool) -> ast.FunctionDef:
    """A copy of the definition with the edits in it, as a method, without decorators."""
    changed = copy.deepcopy(definition)
    changed.decorator_list = []
    positional = changed.args.posonlyargs or changed.args.args
    if not is_method:
        positional.insert(0, ast.arg(OWNER))
    by_place: dict[tuple[int, int, int, int], list[Edit]] = defaultdict(list)
    for edit in edits:
        by_place[edit.location.span].append(edit)
    editor = _Editor(positional[0].arg, by_place)
    editor.visit(changed)
    if editor.pending:
        edit = next(iter(editor.pending.values()))[0]
        raise SourceObstacleError(f"line {edit.location.span[0]} does not call '{edit.function}' by that name")
    for attribute in dict.fromkeys(edit.attribute for edit in edits if edit.by_run):
        begin = ast.parse(f"_qat{attribute} = {positional[0].arg}.{attribute}.begin()").body[0]
        for node in ast.walk(begin):
            ast.copy_location(node, definition.body[0])
        changed.body.insert(0, begin)
    return ast.fix_missing_locations(changed)


class _Editor(ast.NodeTransformer):
    def __init__(self, owner: str, edits: dict[tuple[int, int, int, int], list[Edit]]) -> None:
        self.owner, self.pending = owner, dict(edits)

    def _wrap(self, edit: Edit, expression: ast.expr) -> ast.expr:
        owner = ast.Name(self.owner, ast.Load())
        target: ast.expr = ast.Attribute(owner, edit.attribute, ast.Load())
        if edit.by_run:
            target = ast.Name(f"_qat{edit.attribute}", ast.Load())
        call = ast.Call(target, [expression], [])
        for node in (owner, target, call):
            ast.copy_location(node, expression)
        return call

    def _take(self, node: Any, names: Callable[[Edit], bool]) -> list[Edit]:
        for span in list(self.pending):
            line, end_line, column, end_column = span
            ends = (node.end_lineno, node.end_col_offset) == (end_line, end_column)
            # A method's call begins at its name in Python's tables where a chain of calls is spread over lines.
            starts = isinstance(node, ast.Call) or (node.lineno, node.col_offset) == (line, column)
            if ends and starts and all(names(edit) for edit in self.pending[span]):
                return self.pending.pop(span)
        return []

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        edits = self._take(node, lambda edit: edit.function in _OPERATORS.get(type(node.op), ()))
        self.generic_visit(node)
        result: ast.expr = node
        for edit in edits:
            if edit.what == "result":
                result = self._wrap(edit, node)
            elif edit.key == 0:
                node.left = self._wrap(edit, node.left)
            else:
                node.right = self._wrap(edit, node.right)
        return result

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.AST]:
        edits = self._take(node, lambda edit: edit.function in _OPERATORS.get(type(node.op), ()))
        self.generic_visit(node)
        before: list[ast.AST] = []
        for edit in sorted(edits, key=lambda edit: edit.key == 0):
            if edit.what == "operand" and edit.key == 1:
                node.value = self._wrap(edit, node.value)
            elif edit.what == "operand" and isinstance(node.target, ast.Name):
                # `value = y; x = self.<attribute>(x); x += value`, since y may read x, as it is.
                quantized = self._wrap(edit, ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target))
                before = [_assign("_qat_value", node.value, node), _assign(node.target.id, quantized, node)]
                node.value = ast.copy_location(ast.Name("_qat_value", ast.Load()), node.value)
            else:
                raise SourceObstacleError(f"line {node.lineno} changes that tensor in place")
        return [*before, node]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        edits = self._take(node, lambda edit: _callee(node) == edit.function)
        self.generic_visit(node)
        result: ast.expr = node
        for edit in edits:
            if edit.what == "result":
                result = self._wrap(edit, node)
            elif edit.what == "callee":
                node.func = ast.copy_location(
                    ast.Attribute(ast.Name(self.owner, ast.Load()), edit.attribute, ast.Load()), node.func
                )
            else:
                self._operand(node, edit)
        return result

    def _operand(self, node: ast.Call, edit: Edit) -> None:
        if isinstance(edit.key, str):
            keyword = next((k for k in node.keywords if k.arg == edit.key), None)
            if keyword is None:
                raise SourceObstacleError(f"line {node.lineno} passes '{edit.key}' inside a mapping")
            keyword.value = self._wrap(edit, keyword.value)
            return
        position = edit.key
        if edit.method and isinstance(node.func, ast.Attribute):
            if position == 0:
                if node.func.attr.endswith("_"):
                    raise SourceObstacleError(f"line {node.lineno} changes that tensor in place")
                node.func.value = self._wrap(edit, node.func.value)
                return
            position -= 1
        if position >= len(node.args) or any(isinstance(a, ast.Starred) for a in node.args[: position + 1]):
            raise SourceObstacleError(f"line {node.lineno} passes its arguments as a starred list")
        node.args[position] = self._wrap(edit, node.args[position])


def _assign(name: str, value: ast.expr, near: ast.stmt) -> ast.AST:
    made = ast.Assign([ast.Name(name, ast.Store())], value)
    for part in (made, *made.targets):
        ast.copy_location(part, near)
    return made


_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("add", "iadd", "radd"),
    ast.Mult: ("mul", "imul", "rmul"),
    ast.MatMult: ("matmul", "rmatmul", "imatmul"),
    ast.Div: ("truediv", "div", "itruediv"),
    ast.Sub: ("sub", "isub", "rsub"),
}


def _callee(node: ast.Call) -> str:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name.strip("_")
