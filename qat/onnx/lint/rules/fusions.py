"""Rules on quantizers that break up what TensorRT would fuse: attention, Pad, SiLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qat.onnx.lint.findings import Issue, Rule, Severity
from qat.onnx.lint.graph import (
    ALIASES,
    MOVES,
    LintGraph,
    constant,
    is_dequantize,
    is_qdq,
    is_quantize,
    node_name,
    operand,
    unquantized,
)

_SCALING = ALIASES | {"Mul", "Div", "Add", "Sub", "Where", "Clip", "QuantizeLinear", "DequantizeLinear"}
_QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
_GATES = ALIASES | _QDQ | {"Sigmoid", "HardSigmoid", "Clip", "Add", "Mul", "Div", "Relu"}
_SATURATING = frozenset({"Sigmoid", "HardSigmoid", "Clip"})
_LONGEST_GATE = 8


def _scores(graph: LintGraph, value: Any) -> Any:
    """The product of two activations in front of a softmax, behind scaling and mask."""
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        node = current.producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type == "MatMul" and not any(map(graph.is_constant, node.inputs)):
            return node
        if node.op_type in _SCALING:
            pending += [item for item in node.inputs if item is not None and not graph.is_constant(item)]
    return None


def attention_partial(graph: LintGraph) -> Iterator[Issue]:
    """Attention of which a part is quantized."""
    for softmax in graph.nodes:
        if softmax.op_type != "Softmax":
            continue
        scores = _scores(graph, softmax.inputs[0])
        products = [n for n in graph.readers(softmax.outputs[0], ALIASES | _QDQ) if n.op_type == "MatMul"]
        if scores is None or not products or any(map(graph.is_constant, products[0].inputs)):
            continue
        context = products[0]
        first = unquantized(context.inputs[0]) is softmax.outputs[0]
        parts = {
            "query": graph.dequantizes(scores.inputs[0]),
            "key": graph.dequantizes(scores.inputs[1]),
            "softmax output": graph.dequantizes(context.inputs[0 if first else 1]),
            "value": graph.dequantizes(context.inputs[1 if first else 0]),
        }
        readers = list(graph.readers(context.outputs[0], MOVES))
        quantized = {name: bool(found) for name, found in parts.items()}
        if any(quantized.values()):
            quantized["context"] = any(map(is_quantize, readers)) or not readers
        missing = [name for name, found in quantized.items() if not found]
        if missing and any(quantized.values()):
            yield Issue(
                node_name(softmax),
                f"of this attention {', '.join(n for n, found in quantized.items() if found)} are quantized and "
                f"{', '.join(missing)} are not; TensorRT then splits its fused kernel into as many as seven.",
                "Quantize query, key, value, softmax output (scale 1/127) and context, or none of them.",
            )


def _pads_zeros(node: Any) -> bool:
    """Padding that a convolution can do itself; one that repeats values or adds others is a kernel of its own."""
    if node is None or node.op_type != "Pad":
        return False
    value = operand(node, 2)
    stored = constant(value)
    zero = value is None or (stored is not None and not stored.any())
    return zero and ("mode" not in node.attributes or node.attributes["mode"].as_string() == "constant")


def pad_conv(graph: LintGraph) -> Iterator[Issue]:
    """A quantizer between a zero padding and Conv."""
    for node in graph.nodes:
        if not is_quantize(node):
            continue
        pad = unquantized(node.inputs[0]).producer()
        readers = graph.readers(node.outputs[0], ALIASES | _QDQ)
        if _pads_zeros(pad) and any(reader.op_type == "Conv" for reader in readers):
            yield Issue(
                node_name(node),
                f"it stands between '{node_name(pad)}' and a convolution; by NVIDIA's heuristics such a convolution is "
                "slower in INT8 than in FP16.",
                "Quantize in front of Pad: zeros stay zeros.",
            )


def _gate(graph: LintGraph, value: Any, base: Any) -> list[Any]:
    """Nodes from `value` back to `base` where these make a gate such as a sigmoid; else empty."""
    path: list[Any] = []
    while len(path) < _LONGEST_GATE:
        if value is base:
            return path if any(node.op_type in _SATURATING for node in path) else []
        node = value.producer()
        if node is None or node.op_type not in _GATES:
            return []
        computed = [item for item in node.inputs if item is not None and not graph.is_constant(item)]
        if len(computed) != 1:
            return []
        path.append(node)
        value = computed[0]
    return []


def silu_inside(graph: LintGraph) -> Iterator[Issue]:
    """A quantizer inside x * sigmoid(x), or any other gate on x."""
    for node in graph.nodes:
        if node.op_type != "Mul" or any(map(graph.is_constant, node.inputs)):
            continue
        for straight, gated in (node.inputs, node.inputs[::-1]):
            base = unquantized(straight)
            path = _gate(graph, gated, base)
            if path and (any(map(is_qdq, path)) or is_dequantize(straight.producer())):
                yield Issue(
                    node_name(node),
                    "a quantizer stands inside this SiLU or HardSwish; TensorRT fuses the float activation into the "
                    "kernel behind the convolution, and each quantizer inside adds steps and a rounding.",
                    "Quantize only its result.",
                )
                break


RULES = (
    Rule("attention-partial", Severity.WARNING, "attention quantized in part", attention_partial),
    Rule("pad-conv", Severity.WARNING, "quantizer between Pad and Conv", pad_conv),
    Rule("silu-inside", Severity.WARNING, "quantizer inside SiLU or HardSwish", silu_inside),
)
