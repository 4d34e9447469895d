"""Rules on what reads and what makes codes: half pairs, half-quantized layers, biases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qat.onnx.lint.findings import Issue, Rule, Severity
from qat.onnx.lint.graph import (
    ALIASES,
    MOVES,
    LintGraph,
    behind,
    dims,
    is_dequantize,
    is_quantize,
    node_name,
    operand,
)

_ON_CODES = (MOVES - {"Cast"}) | {"Relu", "Concat"}
"""What may stand between the two of a pair: it gives the same whether before or after scaling."""


def one_sided(graph: LintGraph) -> Iterator[Issue]:
    """QuantizeLinear whose codes nothing dequantizes, and the reverse."""
    for node in graph.nodes:
        if is_quantize(node):
            others = [reader for reader in graph.readers(node.outputs[0], _ON_CODES) if not is_dequantize(reader)]
            if others or node.outputs[0].is_graph_output() or not node.outputs[0].uses():
                what = "the file returns its codes: the engine's output is INT8, and its reader needs the scale."
                if others:
                    what = (
                        f"'{node_name(others[0])}' ({others[0].op_type}) reads its codes without DequantizeLinear; "
                        "TensorRT computes on them as on numbers, in float, and no layer becomes INT8 by it."
                    )
                yield Issue(
                    node_name(node),
                    what,
                    "Put a DequantizeLinear with the same scale behind it.",
                )
        elif is_dequantize(node) and not graph.is_constant(node.inputs[0]):
            source = behind(node.inputs[0], _ON_CODES).producer()
            if not is_quantize(source):
                what = "a graph input" if source is None else f"'{node_name(source)}' ({source.op_type})"
                yield Issue(
                    node_name(node),
                    f"its codes come from {what}, not from QuantizeLinear; the caller of the engine has to quantize "
                    "with the same scale.",
                    "Put a QuantizeLinear with the same scale in front of it.",
                )


def float_weight(graph: LintGraph) -> Iterator[Issue]:
    """Quantized activation, float weight."""
    for node in graph.weighted:
        dequantize, array = graph.weight(node)
        quantizers = graph.dequantizes(node.inputs[0])
        if dequantize is None and array is not None and quantizers and not all(map(graph.is_context, quantizers)):
            yield Issue(
                node_name(node),
                "its input is quantized and its weight is float; TensorRT builds it and runs the layer in float, after "
                "having quantized the input for nothing.",
                "Quantize the weight too, or neither.",
            )


def float_activation(graph: LintGraph) -> Iterator[Issue]:
    """Quantized weight, float activation."""
    for node in graph.weighted:
        dequantize, _ = graph.weight(node)
        if dequantize is not None and not graph.dequantizes(node.inputs[0]):
            yield Issue(
                node_name(node),
                f"its weight is quantized and its input '{node.inputs[0].name}' is float; TensorRT dequantizes the "
                "weight and runs the layer in float.",
                "Quantize the input too, or neither.",
            )


def bias_dequantize(graph: LintGraph, node: Any) -> Any:
    """The DequantizeLinear that makes a layer's bias, as third operand or by an Add behind it; None without."""
    value = operand(node, 2) if node.op_type in {"Conv", "ConvTranspose", "Gemm"} else None
    if node.op_type == "Add":
        for bias, other in (node.inputs, node.inputs[::-1]):
            source = behind(other, ALIASES).producer()
            if graph.is_constant(bias) and source is not None and source.op_type == "MatMul":
                shape = dims(bias)
                value = bias if shape is not None and len(shape) == 1 else None
    if value is None or not graph.is_constant(value):
        return None
    found = behind(value, ALIASES).producer()
    return found if is_dequantize(found) else None


def bias_quantized(graph: LintGraph) -> Iterator[Issue]:
    """Biases behind DequantizeLinear."""
    for node in graph.nodes:
        dequantize = bias_dequantize(graph, node)
        if dequantize is None:
            continue
        codes = dequantize.inputs[0].dtype
        int32 = codes is not None and codes.name == "INT32"
        yield Issue(
            node_name(dequantize),
            f"the bias of {node.op_type} '{node_name(node)}' is quantized; TensorRT "
            + ("refuses INT32 codes." if int32 else "adds it in float anyway, with 8 bits left of it."),
            "Store the bias as float.",
            repairable=True,
            severity=Severity.ERROR if int32 else Severity.WARNING,
        )


RULES = (
    Rule("one-sided", Severity.WARNING, "QuantizeLinear without DequantizeLinear, or the reverse", one_sided),
    Rule("float-weight", Severity.WARNING, "quantized input, float weight", float_weight),
    Rule("float-activation", Severity.WARNING, "quantized weight, float input", float_activation),
    Rule("bias-quantized", Severity.ERROR, "quantized bias", bias_quantized),
)
