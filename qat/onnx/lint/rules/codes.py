"""Rules on the integers: zero-points and their type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qat.onnx.lint.findings import Issue, Rule, Severity
from qat.onnx.lint.graph import LintGraph, constant, integer, is_dequantize, is_quantize, node_name, operand

_REFUSED = frozenset({"UINT8", "INT16", "UINT16"})
_MIDDLE = 128
_SHIFT = "UINT8 around 128 is INT8 around 0: rewrite it so."


def _own(graph: LintGraph) -> Iterator[Any]:
    """QuantizeLinear nodes, and the DequantizeLinear nodes that none feeds: each quantizer once."""
    for node in graph.nodes:
        if is_quantize(node) or (is_dequantize(node) and not is_quantize(node.inputs[0].producer())):
            yield node


def _code_type(node: Any) -> str:
    zero = operand(node, 2)
    value = zero if zero is not None else node.inputs[0] if is_dequantize(node) else None
    return "" if value is None or value.dtype is None else str(value.dtype.name)


def is_shifted_uint8(node: Any) -> bool:
    """UINT8 with zero-points of 128: the same quantization as INT8 with zero-points of 0."""
    zero = constant(operand(node, 2))
    return zero is not None and zero.dtype.name == "uint8" and bool((zero == _MIDDLE).all())


def zero_point_missing(graph: LintGraph) -> Iterator[Issue]:
    """QuantizeLinear without zero-point writes UINT8 by the specification."""
    for node in graph.nodes:
        if is_quantize(node) and operand(node, 2) is None and not integer(node, "output_dtype", 0):
            yield Issue(
                node_name(node),
                "it has no zero-point, which means UINT8 in ONNX; TensorRT reads INT8 without a word, and ONNX Runtime "
                "then computes other numbers.",
                "Write an int8 zero-point of 0.",
                repairable=True,
            )


def zero_point_nonzero(graph: LintGraph) -> Iterator[Issue]:
    """TensorRT's INT8 is symmetric."""
    for node in _own(graph):
        zero = constant(operand(node, 2))
        if zero is not None and zero.any():
            shifted = is_shifted_uint8(node)
            yield Issue(
                node_name(node),
                f"its zero-point is {zero[zero != 0].reshape(-1)[0]}; TensorRT's parser takes "
                "symmetric INT8 only and refuses the file.",
                _SHIFT if shifted else "Calibrate again, symmetric and signed: scale = amax / 127.",
                repairable=shifted,
            )


def code_type(graph: LintGraph) -> Iterator[Issue]:
    """Codes that are not INT8."""
    for node in _own(graph):
        kind = _code_type(node)
        if kind not in _REFUSED:
            continue
        zero = constant(operand(node, 2))
        read_as_int8 = kind == "UINT8" and is_quantize(node) and (zero is None or not zero.any())
        yield Issue(
            node_name(node),
            f"its codes are {kind}; TensorRT "
            + (
                "reads INT8 without a word, so that codes over 127 are lost and ONNX Runtime disagrees."
                if read_as_int8
                else "refuses the file."
            ),
            _SHIFT if is_shifted_uint8(node) else "Quantize signed: int8 zero-point of 0, scale = amax / 127.",
            repairable=is_shifted_uint8(node),
        )


RULES = (
    Rule("zero-point-missing", Severity.ERROR, "QuantizeLinear without zero-point", zero_point_missing),
    Rule("zero-point-nonzero", Severity.ERROR, "asymmetric quantization", zero_point_nonzero),
    Rule("code-type", Severity.ERROR, "UINT8 and other types than INT8", code_type),
)
