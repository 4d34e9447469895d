"""Tensors whose channels can be scaled together without changing what a model computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qat.placement.graph import Graph, Node, Value
from qat.ptq.channels import channels

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)
"""f(s x) = s f(x) for s > 0: a scale passes through."""
_LINEAR = ("identity", "max_pool", "avg_pool", "global_pool", "nearest", "resize", "zero_pad")
_KEEPS_ORDER = ("contiguous", "clone", "flatten", "view", "reshape", "squeeze", "unsqueeze")


@dataclass
class ScalingGroup:
    """Tensors joined by operations that a scale per channel passes through.

    Attributes:
        producers: layers that write them; their output channels are divided by the scale.
        consumers: layers that read them; their input channels are multiplied by it.
        obstacle: why no scale but 1 is possible; "" where any is.
    """

    producers: list[str] = field(default_factory=list)
    consumers: list[str] = field(default_factory=list)
    obstacle: str = ""


class _Union:
    """Values in groups; a group is named by one of its values."""

    def __init__(self) -> None:
        self.parent: dict[Value, Value] = {}
        self.groups: dict[Value, ScalingGroup] = {}

    def find(self, value: Value) -> Value:
        while self.parent.get(value, value) is not value:
            value = self.parent[value]
        self.groups.setdefault(value, ScalingGroup())
        return value

    def group(self, value: Value) -> ScalingGroup:
        return self.groups[self.find(value)]

    def join(self, *values: Value) -> None:
        root = self.find(values[0])
        for value in values[1:]:
            other = self.find(value)
            if other is not root:
                self.parent[other] = root
                lost, kept = self.groups.pop(other), self.groups[root]
                kept.producers += lost.producers
                kept.consumers += lost.consumers
                kept.obstacle = kept.obstacle or lost.obstacle

    def freeze(self, value: Value, obstacle: str) -> None:
        group = self.group(value)
        group.obstacle = group.obstacle or obstacle


def scaling_groups(model: nn.Module, graph: Graph) -> list[ScalingGroup]:
    """Every group with a layer in it, in order of execution, those with an obstacle too."""
    union = _Union()
    single = _layers_of_their_own(model, graph)
    for node in graph.nodes:
        _place(node, union, single, graph)
    for value in graph.outputs:
        union.freeze(value, "its output is an output of the model")
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            if value.kind == "input":
                union.freeze(value, "an input of the model is joined to its output")
            elif value.kind == "activation" and value.producer is None:
                union.freeze(value, "a tensor that no trace sees being made is joined to its output")
    return [group for group in union.groups.values() if group.producers or group.consumers]


def _layers_of_their_own(model: nn.Module, graph: Graph) -> Callable[[Node], str]:
    """Why the weight of a node's layer may not change with its input alone, "" where it may."""
    calls = Counter(node.module for node in graph.nodes if not node.functional)
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    read = {value.name for node in graph.nodes if node.functional for value in node.inputs if value.kind == "parameter"}

    def obstacle(node: Node) -> str:
        m: Any = node.module
        if calls[m] > 1:
            return f"{node.layer} is called more than once"
        if owners[id(m.weight)] > 1 or f"{node.layer}.weight" in read:
            return f"the weight of {node.layer} is used elsewhere too"
        return ""

    return obstacle


def _place(node: Node, union: _Union, obstacle_of: Callable[[Node], str], graph: Graph) -> None:
    active = [value for value in (*node.inputs, *node.outputs) if value.is_activation]
    hidden = next((b for b in graph.branching if not b or f"{node.layer}.".startswith(f"{b}.")), None)
    layer = not node.functional and isinstance(node.module, LAYERS)
    if layer:
        union.group(node.inputs[0]).consumers.append(node.layer)
        union.group(node.outputs[0]).producers.append(node.layer)
    kind = "" if node.functional else f" ({type(node.module).__name__})"
    obstacle = f"a scale per channel does not pass through {node.label}{kind}"
    if hidden is not None or node.seen_elsewhere:
        obstacle = f"{node.label} may do something else on other inputs, or changes a tensor that others read"
    elif layer:
        obstacle = obstacle_of(node) or _layout_obstacle(node)
    else:
        joined = _joined(node)
        if joined:
            union.join(*joined)
            active = [value for value in active if value not in joined]
    if obstacle:
        for value in active:
            union.freeze(value, obstacle)


def _layout_obstacle(node: Node) -> str:
    m: Any = node.module
    dims = 2 if isinstance(m, nn.Linear) else len(m.kernel_size) + 2
    shapes = node.inputs[0].shape, node.outputs[0].shape
    sizes = channels(m, "input"), channels(m, "output")
    if any(len(shape) != dims or shape[1] != size for shape, size in zip(shapes, sizes, strict=True)):
        return f"{node.layer} has no batch of (N, C, ...) tensors"
    return ""


def _joined(node: Node) -> list[Value]:
    """Inputs and output that have one scale per channel; every other tensor of the operation must keep its own."""
    if len(node.outputs) != 1:
        return []
    out = node.outputs[0]
    inputs = [value for value in node.inputs if value.is_activation]
    alike = [value for value in inputs if value.shape[:2] == out.shape[:2] and len(value.shape) > 1]
    if node.op == "add":
        two = len(alike) == len(node.inputs) == 2 and all(value.shape == out.shape for value in alike)
        return [*alike, out] if two else []
    if node.op == "mul":  # what it is multiplied by, a gate say, keeps its own scale
        maps = [value for value in alike if value.shape == out.shape]
        return [maps[0], out] if len(maps) == 1 else []
    if len(alike) != 1 or not _passes(node):
        return []
    return [alike[0], out]


def _passes(node: Node) -> bool:
    if node.op == "activation":
        return node.function == "relu" if node.functional else isinstance(node.module, HOMOGENEOUS)
    if node.op == "reshape":
        before, after = node.inputs[0].shape, node.outputs[0].shape
        kept = before == after or all(size == 1 for size in (*before[2:], *after[2:]))
        return kept and (node.function in _KEEPS_ORDER if node.functional else isinstance(node.module, nn.Flatten))
    return node.op in _LINEAR
