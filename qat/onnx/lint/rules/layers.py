"""Rules on layers: those that are slow in INT8, and those left float between INT8 ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qat.onnx.lint.findings import Issue, Rule, Severity
from qat.onnx.lint.graph import LintGraph, behind, dims, integer, node_name

_SMALL = 16
_POINTWISE = frozenset(
    {"Relu", "Sigmoid", "HardSigmoid", "HardSwish", "Mul", "Add", "Clip", "Cast", "Identity", "BatchNormalization"}
)
_BEFORE_GATES = frozenset({"Add", "Mul", "Cast", "Split"})
_GLOBAL_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax"})


def _channels(graph: LintGraph, node: Any) -> tuple[int, int] | None:
    """(in, out) of a layer, of all groups together; None where unknown."""
    shape = dims(node.inputs[1])
    if shape is None or len(shape) < 2 or not graph.is_constant(node.inputs[1]):
        return None
    low, high = shape[:2] if "Conv" in node.op_type else shape[-2:]
    if low is None or high is None:
        return None
    groups = integer(node, "group", 1)
    if node.op_type == "ConvTranspose":
        return low, high * groups
    swapped = node.op_type == "Conv" or integer(node, "transB", 0)
    return (high * groups, low) if swapped else (low, high)


def _is_small(graph: LintGraph, node: Any) -> bool:
    channels = _channels(graph, node)
    return channels is not None and min(channels) < _SMALL


def _is_grouped(graph: LintGraph, node: Any) -> bool:
    channels, groups = _channels(graph, node), integer(node, "group", 1)
    return groups > 1 and channels is not None and channels[0] > groups


def small_matmul(graph: LintGraph) -> Iterator[Issue]:
    """Matrix products with a short side."""
    for node in graph.weighted:
        if node.op_type in {"MatMul", "Gemm"} and graph.is_int8(node) and _is_small(graph, node):
            channels = _channels(graph, node)
            yield Issue(
                node_name(node),
                f"it is INT8 with (K, N) = {channels}; by NVIDIA's heuristics INT8 is slower than FP16 below {_SMALL}.",
                "Leave it float.",
            )


def small_channels(graph: LintGraph) -> Iterator[Issue]:
    """Convolutions with few channels."""
    for node in graph.weighted:
        if node.op_type == "Conv" and graph.is_int8(node) and _is_small(graph, node):
            yield Issue(
                node_name(node),
                f"it is INT8 with (in, out) = {_channels(graph, node)} channels; by NVIDIA's heuristics most such "
                f"convolutions are slower in INT8 than in FP16 below {_SMALL}.",
                "Measure, and leave it float if that is faster.",
            )


def grouped_conv(graph: LintGraph) -> Iterator[Issue]:
    """Grouped convolutions, depthwise ones not among them."""
    for node in graph.weighted:
        if node.op_type == "Conv" and graph.is_int8(node) and _is_grouped(graph, node):
            yield Issue(
                node_name(node),
                f"it is INT8 with {integer(node, 'group', 1)} groups; by NVIDIA's heuristics grouped convolutions are "
                "slower in INT8 than in FP16.",
                "Measure, and leave it float if that is faster.",
            )


def _reaches_int8(graph: LintGraph, nodes: list[Any], forward: bool) -> set[Any]:
    """Nodes behind (forward) or in front of an INT8 layer."""
    found: set[Any] = set()
    layers = graph.int8_layers
    for node in nodes if forward else reversed(nodes):
        if forward:
            neighbours = [value.producer() for value in node.inputs if value is not None]
        else:
            neighbours = [reader for value in node.outputs for reader, _ in value.uses()]
        if any(near in found or near in layers for near in neighbours):
            found.add(node)
    return found


def _gives_gates(node: Any) -> bool:
    """Whether the result, or its sum with another, is split into parts that go through Sigmoid and Tanh."""
    pending, met = [node], set()
    split = False
    while pending:
        for reader in (reader for value in pending.pop().outputs for reader, _ in value.uses()):
            split = split or (reader.op_type == "Split" and len(reader.outputs) > 2)
            if reader.op_type in _BEFORE_GATES and reader not in met:
                pending.append(reader)
            met.add(reader)
    return split and {"Sigmoid", "Tanh"} <= {reader.op_type for reader in met}


def _intended(graph: LintGraph, node: Any) -> str:
    """Why a float layer may be right as it is."""
    shape = dims(node.inputs[0])
    source = behind(node.inputs[0], _POINTWISE | {"Conv", "Flatten", "Reshape"}).producer()
    if _is_small(graph, node):
        return f"it has fewer than {_SMALL} channels"
    if _is_grouped(graph, node):
        return "it is a grouped convolution"
    if node.op_type == "Conv" and shape is not None and len(shape) > 2 and set(shape[2:]) == {1}:
        return "it works on a map of 1x1, as in squeeze-and-excitation"
    if source is not None and source.op_type in _GLOBAL_POOLS:
        return "it works behind a global pooling, as in squeeze-and-excitation"
    if node.op_type in {"Gemm", "MatMul"} and _gives_gates(node):
        return "it computes the gates of a recurrent cell, one step after another"
    return ""


def float_island(graph: LintGraph) -> Iterator[Issue]:
    """A float layer with INT8 layers before and behind it."""
    behind_int8 = _reaches_int8(graph, graph.nodes, forward=True)
    before_int8 = _reaches_int8(graph, graph.nodes, forward=False)
    for node in graph.weighted:
        dequantize, array = graph.weight(node)
        if array is None or dequantize is not None or graph.dequantizes(node.inputs[0]):
            continue
        if node in behind_int8 and node in before_int8:
            why = _intended(graph, node)
            yield Issue(
                node_name(node),
                "it is float between INT8 layers, so TensorRT converts to float in front of it and back behind it"
                + (f"; {why}, where float is often faster." if why else "."),
                "Keep it, if that is so." if why else "Quantize its input and weight, unless its accuracy forbids.",
                severity=Severity.INFO if why else None,
            )


RULES = (
    Rule("small-matmul", Severity.INFO, "INT8 matrix product with K or N below 16", small_matmul),
    Rule("small-channels", Severity.INFO, "INT8 convolution below 16 channels", small_channels),
    Rule("grouped-conv", Severity.INFO, "INT8 grouped convolution", grouped_conv),
    Rule("float-island", Severity.WARNING, "float layer between INT8 layers", float_island),
)
