"""Rules on the file as a whole: opset, operator style, what is left in float32."""

from __future__ import annotations

from collections.abc import Iterator

from qat.onnx.lint.findings import Issue, Rule, Severity
from qat.onnx.lint.graph import LintGraph, is_qdq, node_name
from qat.onnx.typing_rules import Precision, half_type

_MIN_OPSET = 13
_QOPERATORS = frozenset({"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeLinear", "QGemm"}) | {
    "QAttention",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "QEmbedLayerNormalization",
}


def opset(graph: LintGraph) -> Iterator[Issue]:
    """Per-channel quantization came with opset 13."""
    if graph.opset < _MIN_OPSET and any(map(is_qdq, graph.nodes)):
        yield Issue(
            "",
            f"the file has opset {graph.opset}; its QuantizeLinear has no axis, so weights have one scale a tensor and "
            "lose accuracy.",
            f"Export with opset {_MIN_OPSET} or newer; 21 is qat's default.",
        )


def qoperator(graph: LintGraph) -> Iterator[Issue]:
    """Operators that compute on integers themselves."""
    for node in graph.nodes:
        if node.op_type.startswith("QLinear") or node.op_type in _QOPERATORS:
            yield Issue(
                node_name(node),
                f"{node.op_type} computes on integers itself; TensorRT's parser refuses it.",
                "Export in Q/DQ format: QuantizeLinear and DequantizeLinear around float operators.",
            )


def float_remainder(graph: LintGraph) -> Iterator[Issue]:
    """Nodes that could be half precision."""
    if not any(graph.is_int8(node) for node in graph.weighted):
        return
    io = {*graph.model.graph.inputs, *graph.model.graph.outputs}
    names = [node_name(node) for node in Precision(graph.model, half_type("float16"), io).half]
    if names:
        examples = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
        yield Issue(
            "",
            f"beside the INT8 layers {len(names)} nodes are float32 ({examples}). TensorRT runs a tensor in the type "
            "that the file gives it, so they move twice the bytes of half precision.",
            "Type the file with qat.onnx.to_fp16.",
        )


RULES = (
    Rule("opset", Severity.WARNING, "Q/DQ in an opset below 13", opset),
    Rule("qoperator", Severity.ERROR, "QLinearConv and other integer operators", qoperator),
    Rule("float-remainder", Severity.INFO, "float32 beside INT8", float_remainder),
)
