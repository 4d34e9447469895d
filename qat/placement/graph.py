"""The traced model: tensors, the operations that make and read them, and where in the code an operation stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

Key = int | str
"""Which argument of a call: its position, or its keyword."""

WEIGHTED_OPS = ("conv", "conv_transpose", "linear", "matmul", "attention", "recurrent", "multihead_attention")
"""Operations that multiply matrices."""


@dataclass(frozen=True)
class Location:
    """An expression in a module's own method, or in a function that the method calls.

    Attributes:
        scope: name of the method, as the module's class finds it; inside another location "package.module:function".
        span: first line, last line, first column, last column (bytes) of the expression in its file.
        inside: where in the function that this expression calls; None if this expression is the one.
    """

    scope: str
    span: tuple[int, int, int, int]
    inside: Location | None = None


@dataclass(eq=False)
class Value:
    """A tensor.

    Attributes:
        shape: sizes in the traced run.
        floating: floating-point type.
        kind: where it comes from.
        name: of an input, parameter or buffer; "" for an activation.
        producer: the operation whose output it is.
        readers: operations that read it, each with the number of the operand.
        depth: weighted operations on the longest path from the model's inputs.
    """

    shape: tuple[int, ...]
    floating: bool
    kind: Literal["input", "parameter", "constant", "activation"]
    name: str = ""
    producer: Node | None = None
    readers: list[tuple[Node, int]] = field(default_factory=list)
    depth: int = 0

    @property
    def is_activation(self) -> bool:
        """A floating-point tensor that depends on the model's inputs."""
        return self.floating and self.kind in ("input", "activation")

    @property
    def spatial(self) -> tuple[int, ...]:
        """Sizes behind batch and channels."""
        return self.shape[2:]

    def describe(self) -> str:
        """In words: the input's name, or the layer or operation it comes from."""
        return f"output of {self.producer.label}" if self.producer else f"{self.kind} {self.name}".strip()


@dataclass(eq=False)
class Node:
    """An operation: the call of a leaf module, or of a function or operator inside a module's forward.

    Attributes:
        op: canonical name, see `qat.placement.operators`.
        layer: name of the leaf module, or of the module whose code calls the function.
        module: that module.
        functional: a function or operator, not a module.
        function: name of the function as called.
        method: called as a method of its first tensor, or as an operator.
        location: where the function is called, None where its arguments cannot be reached.
        obstacle: why not, to complete "... stays float because".
        inputs: tensor operands.
        keys: which argument each operand is; one inside a list has the list's key.
        outputs: tensors returned.
        arguments: every argument, tensors left out.
        ordinal: counts the functional operations of one kind in one module.
        run: counts the runs of this expression, in a loop, within one call of its module.
        by_run: each run has quantizers of its own.
        assigns: `x += y`: it changes its first operand in place.
        seen_elsewhere: it changes a tensor in place, and that is read under another name as well.
    """

    op: str
    layer: str
    module: nn.Module
    functional: bool = False
    function: str = ""
    method: bool = False
    location: Location | None = None
    obstacle: str = ""
    inputs: list[Value] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    arguments: dict[Key, Any] = field(default_factory=dict)
    ordinal: int = 0
    run: int = 0
    by_run: bool = False
    assigns: bool = False
    seen_elsewhere: bool = False

    @property
    def label(self) -> str:
        """Name for people: the layer, or the layer and what it computes in its forward, as in `layer1.0.add`."""
        number = f"_{self.ordinal + 1}" if self.ordinal else ""
        number += f" (run {self.run})" if self.by_run else ""
        return f"{self.layer}.{self.op}{number}".lstrip(".") if self.functional else self.layer

    @property
    def weighted(self) -> bool:
        """Whether it multiplies matrices."""
        return self.op in WEIGHTED_OPS


@dataclass(eq=False)
class Graph:
    """One run of a model in evaluation mode.

    Attributes:
        nodes: in the order of execution.
        outputs: what the model returned.
        unreached: weighted layers that were not run.
        branching: modules whose code reads values out of tensors, so that another input may take another path.
        opaque: modules whose inside cannot be seen, with the reason.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    branching: dict[str, str] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)

    def producers(self, value: Value, stop: tuple[str, ...] = WEIGHTED_OPS) -> Iterator[Node]:
        """Operations that `value` is computed from, nearest first; not beyond operations in `stop`, which are given."""
        pending, seen = [value], set()
        while pending:
            node = pending.pop(0).producer
            if node is None or node in seen:
                continue
            seen.add(node)
            yield node
            if node.op not in stop:
                pending += [v for v in node.inputs if v.is_activation]

    def readers(self, value: Value, stop: tuple[str, ...] = WEIGHTED_OPS) -> Iterator[tuple[Node, int]]:
        """Operations computed from `value`, nearest first; not beyond operations in `stop`, which are given."""
        pending, seen = [value], {value}
        while pending:
            for node, operand in pending.pop(0).readers:
                yield node, operand
                if node.op not in stop:
                    fresh = [v for v in node.outputs if v not in seen]
                    seen.update(fresh)
                    pending += fresh
