"""Rules on tensors that meet: residual adds and concatenations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qat.onnx.lint.findings import Issue, Rule, Severity
from qat.onnx.lint.graph import ALIASES, WEIGHTED, LintGraph, is_dequantize, is_quantize, node_name, scale_of
from qat.onnx.lint.rules.scales import differ

_FUSED = ALIASES | {"BatchNormalization", "QuantizeLinear", "DequantizeLinear"}
_BY_CONSTANT = frozenset({"Add", "Sub", "Mul", "Div"})


def _layer_before(graph: LintGraph, value: Any) -> Any:
    """The layer that makes a value which nothing else reads, behind what TensorRT fuses into its kernel; or None."""
    while True:
        node = value.producer()
        readers = {reader for reader, _ in value.uses()}
        if node is None or len(readers) > 1 or value.is_graph_output():
            return None
        if node.op_type in WEIGHTED:
            return node if any(graph.is_constant(item) for item in node.inputs[1:2]) else None
        if node.op_type in _FUSED:
            value = node.inputs[0]
        elif node.op_type in _BY_CONSTANT:
            computed = [item for item in node.inputs if not graph.is_constant(item)]
            if len(computed) != 1:
                return None
            value = computed[0]
        else:
            return None


def _adds(graph: LintGraph) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Adds of two computed tensors: node, the quantizers of both (or None), the layers of both (or None)."""
    for node in graph.nodes:
        if node.op_type == "Add" and not any(graph.is_constant(value) for value in node.inputs):
            quantizers = [next(iter(graph.dequantizes(value)), None) for value in node.inputs]
            yield node, quantizers, [_layer_before(graph, value) for value in node.inputs]


def residual_conv_branch(graph: LintGraph) -> Iterator[Issue]:
    """Only the wrong branch is quantized."""
    for node, quantizers, layers in _adds(graph):
        for here, there in ((0, 1), (1, 0)):
            if quantizers[here] and layers[here] and not quantizers[there] and not layers[there]:
                yield Issue(
                    node_name(node),
                    f"its operand from '{node_name(layers[here])}' is quantized and the identity is not. TensorRT adds "
                    "inside the layer's kernel; the quantizer breaks that up by a requantization, and the identity is "
                    "read as float, four times the bytes.",
                    f"Move the quantizer '{node_name(quantizers[here])}' to the identity, '{node.inputs[there].name}'.",
                )


def residual_both(graph: LintGraph) -> Iterator[Issue]:
    """Both branches are quantized."""
    for node, quantizers, layers in _adds(graph):
        if all(quantizers) and any(layers):
            branch = 0 if layers[0] else 1
            yield Issue(
                node_name(node),
                "both of its operands are quantized; TensorRT adds inside the kernel of "
                f"'{node_name(layers[branch])}', and the quantizer behind that costs a requantization.",
                f"Remove the quantizer '{node_name(quantizers[branch])}'.",
            )


def residual_float(graph: LintGraph) -> Iterator[Issue]:
    """No branch of a convolution's residual add is quantized."""
    for node, quantizers, layers in _adds(graph):
        convolutions = [layer for layer in layers if layer is not None and layer.op_type == "Conv"]
        if not any(quantizers) and any(map(graph.is_int8, convolutions)):
            names = [value.name for value, layer in zip(node.inputs, layers, strict=True) if layer is None]
            yield Issue(
                node_name(node),
                f"the INT8 convolution '{node_name(convolutions[0])}' ends in it and no operand is quantized; TensorRT "
                "reads the identity as float, four times the bytes of INT8.",
                f"Quantize the identity, '{names[0] if names else node.inputs[1].name}'.",
            )


def concat_scales(graph: LintGraph) -> Iterator[Issue]:
    """A concatenation of tensors with different scales."""
    for node in graph.nodes:
        if node.op_type != "Concat" or not graph.dequantizes(node.outputs[0]):
            continue
        quantizers = graph.dequantizes(node.outputs[0])
        scales = [scale_of(item) for item in quantizers]
        values = {float(scale.reshape(-1)[0]) for scale in scales if scale is not None and scale.size == 1}
        if len(values) > 1:
            after = any(is_quantize(reader) for reader in graph.readers(node.outputs[0], ALIASES))
            yield Issue(
                node_name(node),
                f"its inputs have {len(values)} different scales, from {min(values):g} to {max(values):g}; TensorRT "
                + ("requantizes them to one." if after else "joins them in float, and the layers behind are not INT8."),
                "Give all inputs one quantizer, or quantize only the result.",
            )


def requantize(graph: LintGraph) -> Iterator[Issue]:
    """A quantizer directly behind another one with another scale."""
    for node in filter(is_quantize, graph.nodes):
        before = node.inputs[0].producer()
        first, second = (scale_of(before), scale_of(node)) if is_dequantize(before) else (None, None)
        if differ(first, second):
            yield Issue(
                node_name(node),
                f"it quantizes what '{node_name(before)}' has just dequantized, with another scale: a kernel that "
                "requantizes, and a second rounding.",
                "Let all readers of the tensor share one quantizer.",
            )


RULES = (
    Rule("residual-conv-branch", Severity.WARNING, "quantizer on the layer's branch of an add", residual_conv_branch),
    Rule("residual-both", Severity.WARNING, "both branches of an add quantized", residual_both),
    Rule("residual-float", Severity.WARNING, "no branch of a residual add quantized", residual_float),
    Rule("concat-scales", Severity.WARNING, "different scales into a concat", concat_scales),
    Rule("requantize", Severity.WARNING, "a quantizer on a quantized tensor", requantize),
)
