"""What a built engine does with quantizers: layers in INT8, kernels that only convert, residual adds, traffic."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from qat.tensorrt import Inspection, Layer, OnnxGraph
from qat.tensorrt.inspection import describe
from qat.tensorrt.onnx_graph import WEIGHTED_OPS, node_name

BYTES = {"int8": 1, "fp8": 1, "bool": 1, "fp16": 2, "bf16": 2, "fp32": 4, "int32": 4, "int64": 8}
ACTIVATIONS = ("Relu", "Clip", "Cast", "Identity")
"""What may stand between a residual add and the quantizer of its sum."""


def count(graph: OnnxGraph, inspection: Inspection) -> dict[str, Any]:
    """Counts for one engine; a weighted layer is an ONNX node that convolves or multiplies matrices.

    - quantized, int8: weighted layers that carry Q/DQ, and those of them that run in INT8; `lost` names the others.
    - float: weighted layers without Q/DQ.
    - standalone_qdq: kernels that only quantize, dequantize or requantize.
    - reformats: kernels that only move or cast.
    - adds, adds_int8: residual adds, and those whose kernel reads an operand in INT8.
    - requantized_adds: residual adds with a standalone Q/DQ kernel at the sum, or at an operand for the add alone.
    - kernels: all of them, less those that only synchronize.
    - traffic_mib: what the kernels read and write in activations.
    """
    carrying = graph.quantized_nodes
    quantized = [op for op in inspection.operations if op.node in carrying]
    lost = [op for op in quantized if op.precision != "int8"]
    adds = residual_adds(graph)
    kernels = [layer for layer in inspection.layers if layer.inputs or layer.outputs]
    standalone = {name for layer in inspection.standalone_qdq for name in layer.onnx_nodes}
    return {
        "weighted": len(inspection.operations),
        "quantized": len(quantized),
        "int8": len(quantized) - len(lost),
        "float": len(inspection.operations) - len(quantized),
        "lost": [describe(op) for op in lost],
        "standalone_qdq": len(inspection.standalone_qdq),
        "standalone_qdq_nodes": [list(layer.onnx_nodes) for layer in inspection.standalone_qdq],
        "reformats": len(inspection.reformats),
        "adds": len(adds),
        "adds_int8": sum(reads_int8(name, kernels) for name in adds),
        "adds_read": dict(Counter(kind for name in adds for kind in types_read(name, kernels)).most_common()),
        "requantized_adds": sum(not standalone.isdisjoint(quantizers) for quantizers in adds.values()),
        "kernels": len(kernels),
        "traffic_mib": round(sum(map(traffic, kernels)) / 2**20, 1),
    }


def residual_adds(graph: OnnxGraph) -> dict[str, set[str]]:
    """Adds of two activations -> names of the quantize and dequantize nodes at their operands and at their sum.

    Not named are those at an operand that a weighted layer reads as well: its input has to be quantized anyway.
    """
    found = {}
    for node in graph.nodes:
        if node.op_type == "Add" and not any(graph.is_constant(tensor) for tensor in node.input):
            before = {name for tensor in node.input for name in _quantizers_before(graph, tensor)}
            found[node_name(node)] = before | graph.quantizers(node.output[0], ACTIVATIONS)
    return found


def _quantizers_before(graph: OnnxGraph, tensor: str) -> list[str]:
    names: list[str] = []
    node = graph.producer(tensor)
    while node is not None and node.op_type in ("Cast", "DequantizeLinear", "QuantizeLinear"):
        if any(reader.op_type in WEIGHTED_OPS for reader in graph.readers(node.output[0])):
            return []
        if node.op_type != "Cast":
            names.append(node_name(node))
        node = graph.producer(node.input[0])
    return names


def types_read(add: str, kernels: list[Layer]) -> list[str]:
    """Types that the kernels of an add read, e.g. "fp32+int8"."""
    return ["+".join(sorted(t.dtype for t in layer.inputs)) for layer in kernels if add in layer.onnx_nodes]


def reads_int8(add: str, kernels: list[Layer]) -> bool:
    """Whether an operand of an add arrives in INT8.

    It is as large as the other operand, unlike what a kernel reads for a concat that it computes as well. A weighted
    kernel reads its own activation in INT8 besides.
    """
    for layer in kernels:
        sizes = [math.prod(t.shape) for t in layer.inputs]
        pairs = zip(layer.inputs, sizes, strict=True)
        operands = sum(t.dtype == "int8" and sizes.count(size) > 1 for t, size in pairs)
        if add in layer.onnx_nodes and operands > layer.is_weighted:
            return True
    return False


def traffic(layer: Layer) -> int:
    """Bytes of activations that a kernel reads and writes; shapes must be known."""
    return sum(math.prod(t.shape) * BYTES.get(t.dtype, 0) for t in (*layer.inputs, *layer.outputs))
