"""Rules on per-channel scales: which axis, and where there may be none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qat.onnx.lint.findings import Issue, Rule, Severity
from qat.onnx.lint.graph import LintGraph, dims, integer, is_quantize, node_name, scale_of


def _axis_at(value: Any, dequantize: Any) -> int | None:
    """The quantization axis as the reader of `value` sees it, behind transposes; None if it cannot be told."""
    perms = []
    while value is not dequantize.outputs[0]:
        node = value.producer()
        if node.op_type == "Transpose" and "perm" in node.attributes:
            perms.append(list(node.attributes["perm"].as_ints()))
        elif node.op_type not in {"Cast", "Identity"}:
            return None
        value = node.inputs[0]
    shape = dims(value)
    if shape is None:
        return None
    axis = integer(dequantize, "axis", 1) % len(shape)
    for perm in reversed(perms):
        axis = perm.index(axis)
    return axis


def _wanted(node: Any) -> int | None:
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        return 0 if integer(node, "transB", 0) else 1
    shape = dims(node.inputs[1])
    return None if shape is None or len(shape) < 2 else len(shape) - 1


def _per_channel(dequantize: Any) -> bool:
    scale = None if dequantize is None else scale_of(dequantize)
    return scale is not None and scale.ndim == 1 and scale.size > 1


def weight_axis(graph: LintGraph) -> Iterator[Issue]:
    """Scales along another axis than the output channels."""
    for node in graph.weighted:
        dequantize, _ = graph.weight(node)
        if node.op_type == "ConvTranspose" or not _per_channel(dequantize):
            continue
        axis, wanted = _axis_at(node.inputs[1], dequantize), _wanted(node)
        if axis is not None and wanted is not None and axis != wanted:
            yield Issue(
                node_name(dequantize),
                f"the weight of {node.op_type} '{node_name(node)}' has its scales along axis {axis}, output channels "
                f"are axis {wanted}; TensorRT builds it and runs the layer in float.",
                f"Quantize along axis {wanted}.",
            )


def conv_transpose(graph: LintGraph) -> Iterator[Issue]:
    """ConvTranspose with quantized weights."""
    for node in graph.weighted:
        dequantize, _ = graph.weight(node)
        if node.op_type != "ConvTranspose" or dequantize is None:
            continue
        if _per_channel(dequantize):
            yield Issue(
                node_name(dequantize),
                f"the weight of ConvTranspose '{node_name(node)}' has one scale a channel; whichever axis it is, "
                "TensorRT builds it and runs the layer in float.",
                "Use one scale for the whole weight, or leave the layer float.",
            )
        else:
            yield Issue(
                node_name(node),
                "TensorRT for RTX 1.7 has no INT8 kernel for ConvTranspose and runs it in float.",
                "Look at the build log; leave the layer float if it is not INT8 there.",
                severity=Severity.INFO,
            )


def activation_per_channel(graph: LintGraph) -> Iterator[Issue]:
    """Activations with more than one scale."""
    for node in filter(is_quantize, graph.nodes):
        scale = scale_of(node)
        if scale is not None and scale.ndim == 1 and scale.size > 1 and not graph.is_constant(node.inputs[0]):
            yield Issue(
                node_name(node),
                f"an activation has {scale.size} scales, one a channel; TensorRT builds it and runs the layers that "
                "read it in float.",
                "Quantize activations with one scale a tensor.",
            )


RULES = (
    Rule("weight-axis", Severity.WARNING, "weight scales along the wrong axis", weight_axis),
    Rule("convtranspose", Severity.WARNING, "ConvTranspose with per-channel weights", conv_transpose),
    Rule("activation-per-channel", Severity.WARNING, "activation with one scale a channel", activation_per_channel),
)
