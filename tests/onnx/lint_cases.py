"""One minimal bad file for each rule of the linter: the model, and the node that the finding names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from graphs import GraphWriter, attention, residual
from onnx import TensorProto

Case = tuple[Any, str]


def _one_conv(**quantizer: Any) -> Case:
    w = GraphWriter()
    w.conv(w.qdq("x", "q", **quantizer), "y")
    return w.model("y"), "q/QuantizeLinear"


def _with_weight(weight: Callable[[GraphWriter], str], op_type: str, node: str, **attributes: Any) -> Case:
    w = GraphWriter()
    w.add(op_type, [w.qdq("x", "q"), weight(w)], "y", **attributes)
    shape = (2, 32, 8, 8) if "Conv" in op_type else (8, 32)
    return w.model("y", {"x": shape}), node


def _opset() -> Case:
    w = GraphWriter(12)
    pair = [w.constant("s", np.float32(0.02)), w.constant("z", np.int8(0))]
    w.add("DequantizeLinear", [w.add("QuantizeLinear", ["x", *pair], "q"), *pair], "y")
    return w.model("y"), ""


def _qoperator() -> Case:
    w = GraphWriter()
    w.add("MatMulInteger", ["x", w.constant("w", np.ones((8, 8), np.int8))], "y")
    model = w.model("y", {"x": (8, 8)}, TensorProto.INT32)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT8
    return model, "y"


def _scale_computed() -> Case:
    w = GraphWriter()
    pair = [w.add("ReduceMax", ["x"], "amax", keepdims=0), w.constant("z", np.int8(0))]
    w.add("DequantizeLinear", [w.add("QuantizeLinear", ["x", *pair], "q"), *pair], "y")
    return w.model("y"), "q"


def _scale_shape() -> Case:
    w = GraphWriter()
    stored = [w.constant("codes", np.ones((32, 32), np.int8)), w.constant("s", np.full((2, 32), 0.1, np.float32))]
    stored.append(w.constant("z", np.zeros((2, 32), np.int8)))
    weight = w.add("DequantizeLinear", stored, "weight_dq", axis=0, block_size=16)
    w.add("MatMul", [w.qdq("x", "q"), weight], "y")
    return w.model("y", {"x": (8, 32)}), "weight_dq"


def _pair_scales() -> Case:
    model, _ = _one_conv()
    w = GraphWriter()
    model.graph.initializer.append(w.initializers[0] if w.initializers else _scalar("other", 0.03))
    next(node for node in model.graph.node if node.name == "q/DequantizeLinear").input[1] = "other"
    return model, "q/DequantizeLinear"


def _scalar(name: str, value: float) -> Any:
    w = GraphWriter()
    w.constant(name, np.float32(value))
    return w.initializers[0]


def _one_sided() -> Case:
    w = GraphWriter()
    pair = [w.constant("s", np.float32(0.02)), w.constant("z", np.int8(0))]
    w.add("Cast", [w.add("QuantizeLinear", ["x", *pair], "q")], "y", to=TensorProto.FLOAT)
    return w.model("y"), "q"


def _float_activation() -> Case:
    w = GraphWriter()
    w.conv("x", "y")
    return w.model("y"), "y"


def _bias(kind: str) -> Case:
    w = GraphWriter()
    if kind == "int32":
        stored = [w.constant("b", np.arange(32, dtype=np.int32)), w.constant("bs", np.float32(0.01))]
        bias = w.add("DequantizeLinear", [*stored, w.constant("bz", np.int32(0))], "bias/DequantizeLinear")
    else:
        bias = w.qdq(w.normal("b", 32), "bias", 0.002)
    w.add("Conv", [w.qdq("x", "q"), w.weight("w", (32, 32, 3, 3)), bias], "y", pads=[1] * 4)
    return w.model("y"), "bias/DequantizeLinear"


def concat(scales: tuple[float, float], after: bool = False) -> Any:
    w = GraphWriter()
    x = w.qdq("x", "q")
    parts = [w.qdq(w.conv(x, name), f"{name}_q", scale) for name, scale in zip("ab", scales, strict=True)]
    joined = w.add("Concat", parts, "joined", axis=1)
    w.conv(w.qdq(joined, "after", scales[0]) if after else joined, "y", (64, 32))
    return w.model("y")


def _requantize() -> Case:
    w = GraphWriter()
    w.conv(w.qdq(w.qdq("x", "first"), "second", 0.03), "y")
    return w.model("y"), "second/QuantizeLinear"


def pad(quantize_first: bool, value: float | None = None, **attributes: Any) -> Any:
    w = GraphWriter()
    sizes = w.constant("sizes", np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    x = w.qdq("x", "q") if quantize_first else "x"
    filled = [] if value is None else [w.constant("value", np.float32(value))]
    x = w.add("Pad", [x, sizes, *filled], "padded", **attributes)
    w.conv(x if quantize_first else w.qdq(x, "q"), "y", pads=[0] * 4)
    return w.model("y")


def silu(inside: str = "", hard: bool = False) -> Any:
    """Conv, gate, Mul, Conv; `inside`: "gate" quantizes the gate, "input" the tensor in front of both."""
    w = GraphWriter()
    x = w.conv(w.qdq("x", "q"), "first")
    x = w.qdq(x, "input") if inside == "input" else x
    if hard:
        raised = w.add("Add", [x, w.constant("three", np.float32(3))], "raised")
        limits = [w.constant("low", np.float32(0)), w.constant("high", np.float32(6))]
        gate = w.add("Clip", [raised, *limits], "clipped")
        gate = w.add("Div", [gate, w.constant("six", np.float32(6))], "sigmoid")
    else:
        gate = w.add("Sigmoid", [x], "sigmoid")
    gate = w.qdq(gate, "gate", 1 / 127) if inside == "gate" else gate
    w.conv(w.qdq(w.add("Mul", [x, gate], "silu"), "after"), "y")
    return w.model("y")


def island(channels: int = 32, squeezed: bool = False) -> Any:
    w = GraphWriter()
    x = w.conv(w.qdq("x", "q"), "first")
    if squeezed:
        x = w.add("GlobalAveragePool", [x], "squeeze")
    x = w.conv(x, "middle", (32, channels), weight=w.normal("float", channels, 32, 3, 3))
    w.conv(w.qdq(x, "last_q"), "y", (channels, 32))
    return w.model("y")


def _small_depthwise() -> Case:
    w = GraphWriter()
    w.conv(w.qdq("x", "q"), "y", (8, 8), group=8)
    return w.model("y", {"x": (2, 8, 8, 8)}), "y"


def depthwise_island(channels: int) -> Any:
    """All channels of a depthwise convolution count, not the one of each group."""
    w = GraphWriter()
    x = w.conv(w.qdq("x", "q"), "first", (32, channels))
    x = w.conv(x, "middle", weight=w.normal("float", channels, 1, 3, 3), channels=(channels, channels), group=channels)
    w.conv(w.qdq(x, "last_q"), "y", (channels, 32))
    return w.model("y")


def transposed_island() -> Any:
    w = GraphWriter()
    x = w.conv(w.qdq("x", "q"), "first")
    x = w.add("ConvTranspose", [x, w.normal("float", 32, 32, 2, 2)], "middle", strides=[2, 2])
    w.conv(w.qdq(x, "last_q"), "y")
    return w.model("y")


BAD: dict[str, Callable[[], Case]] = {
    "opset": _opset,
    "qoperator": _qoperator,
    "float-remainder": lambda: (residual(), ""),
    "zero-point-missing": lambda: _one_conv(zero=None),
    "zero-point-nonzero": lambda: _one_conv(zero=np.int8(3)),
    "code-type": lambda: _one_conv(zero=np.uint8(0)),
    "scale-value": lambda: _one_conv(scale=-0.02),
    "scale-computed": _scale_computed,
    "scale-shape": _scale_shape,
    "scale-vector": lambda: _one_conv(scale=[0.02]),
    "pair-scales": _pair_scales,
    "weight-axis": lambda: _with_weight(lambda w: w.weight("w", (32, 32, 3, 3), 1), "Conv", "w.dq"),
    "convtranspose": lambda: _with_weight(lambda w: w.weight("w", (32, 32, 2, 2), 1), "ConvTranspose", "w.dq"),
    "activation-per-channel": lambda: _one_conv(scale=[0.02] * 32, axis=1),
    "one-sided": _one_sided,
    "float-weight": lambda: _with_weight(lambda w: w.normal("w", 32, 32, 3, 3), "Conv", "y"),
    "float-activation": _float_activation,
    "bias-quantized": lambda: _bias("int32"),
    "residual-conv-branch": lambda: (residual(("branch",)), "add"),
    "residual-both": lambda: (residual(("branch", "identity")), "add"),
    "residual-float": lambda: (residual(()), "add"),
    "concat-scales": lambda: (concat((0.02, 0.03)), "joined"),
    "requantize": _requantize,
    "attention-partial": lambda: (attention("qk"), "softmax"),
    "pad-conv": lambda: (pad(quantize_first=False), "q/QuantizeLinear"),
    "silu-inside": lambda: (silu("gate"), "silu"),
    "small-matmul": lambda: _with_weight(lambda w: w.weight("w", (32, 8), 1), "MatMul", "y"),
    "small-channels": lambda: _with_weight(lambda w: w.weight("w", (8, 32, 3, 3)), "Conv", "y"),
    "grouped-conv": lambda: _with_weight(lambda w: w.weight("w", (32, 8, 3, 3)), "Conv", "y", group=4),
    "float-island": lambda: (island(), "middle"),
}

MORE_BAD: list[tuple[str, Callable[[], Case]]] = [
    ("zero-point-nonzero", lambda: _one_conv(zero=np.uint8(128))),
    ("code-type", lambda: _one_conv(zero=np.int16(0))),
    ("scale-value", lambda: _one_conv(scale=float("nan"))),
    ("scale-value", lambda: _one_conv(scale=float("inf"))),
    ("scale-value", lambda: _one_conv(scale=0.0)),
    ("bias-quantized", lambda: _bias("int8")),
    ("weight-axis", lambda: _with_weight(lambda w: w.weight("w", (32, 32), 1), "Gemm", "w.dq", transB=1)),
    ("weight-axis", lambda: _with_weight(lambda w: w.weight("w", (32, 32), 0), "Gemm", "w.dq")),
    ("weight-axis", lambda: _with_weight(lambda w: w.weight("w", (32, 32), 0), "MatMul", "w.dq")),
    ("concat-scales", lambda: (concat((0.02, 0.03), after=True), "joined")),
    ("attention-partial", lambda: (attention("qkvp"), "softmax")),
    ("attention-partial", lambda: (attention("p"), "softmax")),
    ("silu-inside", lambda: (silu("input"), "silu")),
    ("silu-inside", lambda: (silu("gate", hard=True), "silu")),
    ("pad-conv", lambda: (pad(quantize_first=False, value=0.0, mode="constant"), "q/QuantizeLinear")),
    ("float-island", lambda: (depthwise_island(32), "middle")),
    ("float-island", lambda: (transposed_island(), "middle")),
    ("small-channels", _small_depthwise),
]


def transposed_matmul() -> Any:
    """Weight [N, K] with scales along N, transposed behind DequantizeLinear: correct."""
    w = GraphWriter()
    weight = w.add("Transpose", [w.weight("w", (64, 32))], "wt", perm=[1, 0])
    w.add("MatMul", [w.qdq("x", "q"), weight], "y")
    return w.model("y", {"x": (8, 32)})


GOOD: dict[str, Callable[[], Any]] = {
    "residual": residual,
    "attention": attention,
    "float attention": lambda: attention(""),
    "attention and float projection": lambda: attention(float_projection=True),
    "concat": lambda: concat((0.02, 0.02)),
    "pad": lambda: pad(quantize_first=True),
    "reflecting pad": lambda: pad(quantize_first=False, mode="reflect"),
    "pad with ones": lambda: pad(quantize_first=False, value=1.0),
    "silu": silu,
    "hard swish": lambda: silu(hard=True),
    "squeeze": lambda: island(squeezed=True),
    "small island": lambda: island(8),
    "small depthwise island": lambda: depthwise_island(8),
    "transposed": transposed_matmul,
    "depthwise": lambda: _with_weight(lambda w: w.weight("w", (32, 1, 3, 3)), "Conv", "y", group=32)[0],
}
