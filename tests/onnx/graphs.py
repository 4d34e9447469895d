"""Q/DQ graphs written by hand, as other exporters might write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ZERO = np.zeros((), np.int8)
MAP = (2, 32, 8, 8)


class GraphWriter:
    """Nodes and initializers of one graph; every method returns the name of the tensor that it makes."""

    def __init__(self, opset: int = 21) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.opset = opset
        self.rng = np.random.default_rng(0)

    def constant(self, name: str, value: Any) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def normal(self, name: str, *shape: int) -> str:
        return self.constant(name, (self.rng.standard_normal(shape) * 0.1).astype(np.float32))

    def add(self, op_type: str, inputs: list[str], name: str, domain: str = "", **attributes: Any) -> str:
        """A node whose output has its own name."""
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def qdq(self, x: str, name: str, scale: Any = 0.02, zero: Any = ZERO, axis: int | None = None) -> str:
        """Nodes `<name>/QuantizeLinear` and `<name>/DequantizeLinear`; zero None writes no zero-point."""
        pair = [self.constant(f"{name}.scale", np.asarray(scale, np.float32))]
        if zero is not None:
            pair.append(self.constant(f"{name}.zero", np.full(np.shape(scale), zero)))
        attributes = {} if axis is None else {"axis": axis}
        codes = self.add("QuantizeLinear", [x, *pair], f"{name}/QuantizeLinear", **attributes)
        return self.add("DequantizeLinear", [codes, *pair], f"{name}/DequantizeLinear", **attributes)

    def weight(self, name: str, shape: tuple[int, ...], axis: int | None = 0) -> str:
        """INT8 codes behind DequantizeLinear."""
        values = (self.rng.standard_normal(shape) * 0.1).astype(np.float32)
        others = None if axis is None else tuple(dim for dim in range(len(shape)) if dim != axis)
        amax = np.abs(values).max(axis=others, keepdims=axis is not None)
        codes = np.clip(np.rint(values / (amax / 127)), -127, 127).astype(np.int8)
        scale = (amax / 127).astype(np.float32).reshape(() if axis is None else -1)
        inputs = [self.constant(f"{name}.codes", codes), self.constant(f"{name}.scale", scale)]
        inputs.append(self.constant(f"{name}.zero", np.zeros(scale.shape, np.int8)))
        return self.add("DequantizeLinear", inputs, f"{name}.dq", **({} if axis is None else {"axis": axis}))

    def conv(self, x: str, name: str, channels: tuple[int, int] = (32, 32), weight: str = "", **attributes: Any) -> str:
        """3x3 convolution with float bias."""
        shape = (channels[1], channels[0] // attributes.get("group", 1), 3, 3)
        inputs = [x, weight or self.weight(f"{name}.weight", shape), self.normal(f"{name}.bias", channels[1])]
        return self.add("Conv", inputs, name, **{"pads": [1] * 4, **attributes})

    def batch_norm(self, x: str, name: str, channels: int = 32) -> str:
        values = {"gamma": 1.2, "beta": 0.1, "mean": 0.05, "variance": 0.7}
        stored = [self.constant(f"{name}.{k}", np.full(channels, v, np.float32)) for k, v in values.items()]
        return self.add("BatchNormalization", [x, *stored], name)

    def linear(self, x: str, name: str, sides: tuple[int, int] = (32, 32), quantized: bool = True) -> str:
        """MatMul and the Add of a float bias."""
        weight = self.weight(f"{name}.weight", sides, 1) if quantized else self.normal(f"{name}.weight", *sides)
        product = self.add("MatMul", [x, weight], f"{name}/MatMul")
        return self.add("Add", [product, self.normal(f"{name}.bias", sides[1])], name)

    def model(
        self, output: str, inputs: dict[str, tuple[int, ...]] | None = None, kind: int = TensorProto.FLOAT
    ) -> onnx.ModelProto:
        """The model; its input is `x`, a feature map, unless named otherwise."""
        float_kind = TensorProto.FLOAT
        values = [helper.make_tensor_value_info(k, float_kind, v) for k, v in (inputs or {"x": MAP}).items()]
        result = helper.make_tensor_value_info(output, kind, None)
        graph = helper.make_graph(self.nodes, "graph", values, [result], self.initializers)
        opsets = [helper.make_opsetid("", self.opset)]
        if any(node.domain for node in self.nodes):
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8 if self.opset < 19 else 10)
        model.graph.output[0].CopyFrom(onnx.shape_inference.infer_shapes(model).graph.output[0])
        return model


def residual(quantize: tuple[str, ...] = ("identity",), opset: int = 21) -> onnx.ModelProto:
    """Stem, one residual block with BatchNorm, max pooling between quantizers, classifier.

    Args:
        quantize: operands of the add that get a quantizer of their own, "identity" or "branch".
        opset: of the file.
    """
    w = GraphWriter(opset)
    stem = w.add("Relu", [w.batch_norm(w.conv(w.qdq("x", "x_q"), "stem"), "stem_bn")], "stem_relu")
    shared = w.qdq(stem, "block_q")
    pooled = w.add("MaxPool", [shared], "pool", kernel_shape=[2, 2], strides=[2, 2])
    branch = w.add("Relu", [w.batch_norm(w.conv(w.qdq(pooled, "conv1_q"), "conv1"), "bn1")], "relu1")
    branch = w.batch_norm(w.conv(w.qdq(branch, "conv2_q"), "conv2"), "bn2")
    float_pool = w.add("MaxPool", [stem], "float_pool", kernel_shape=[2, 2], strides=[2, 2])
    identity = pooled if "identity" in quantize else float_pool
    branch = w.qdq(branch, "branch_q") if "branch" in quantize else branch
    result = w.add("Relu", [w.add("Add", [branch, identity], "add")], "relu2")
    flat = w.add("Flatten", [w.add("GlobalAveragePool", [result], "gap")], "flat")
    weight = w.weight("fc.weight", (32, 32))
    w.add("Gemm", [w.qdq(flat, "fc_q"), weight, w.normal("fc.bias", 32)], "y", transB=1)
    return w.model("y")


def attention(quantized: str = "qkvpc", mask: float = 0.0, float_projection: bool = False) -> onnx.ModelProto:
    """LayerNorm, two heads over 16 tokens of 32, projection, residual.

    Args:
        quantized: letters of what gets a quantizer: query, key, value, probabilities, context.
        mask: added to half of the scores, by Where, unless 0.
        float_projection: leave the layer that reads the context float.
    """
    w = GraphWriter()

    def maybe(x: str, letter: str, scale: float = 0.02) -> str:
        return w.qdq(x, f"{letter}_q", scale) if letter in quantized else x

    ones, zeros = np.ones(32, np.float32), np.zeros(32, np.float32)
    norm = w.add("LayerNormalization", ["x", w.constant("gamma", ones), w.constant("beta", zeros)], "norm", axis=-1)
    tokens, heads = w.qdq(norm, "in_q"), w.constant("heads", np.array([2, 16, 2, 16]))
    parts = {}
    for letter, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        split = w.add("Reshape", [w.linear(tokens, letter), heads], f"{letter}_split")
        parts[letter] = maybe(w.add("Transpose", [split], f"{letter}_heads", perm=perm), letter)
    scores = w.add("MatMul", [parts["q"], parts["k"]], "scores")
    scores = w.add("Mul", [scores, w.constant("root", np.float32(0.25))], "scaled")
    if mask:
        keep = w.constant("keep", np.arange(16) < 8)
        scores = w.add("Where", [keep, scores, w.constant("mask", np.float32(mask))], "masked")
    weights = maybe(w.add("Softmax", [scores], "softmax", axis=-1), "p", 1 / 127)
    context = w.add("Transpose", [w.add("MatMul", [weights, parts["v"]], "context")], "merged", perm=[0, 2, 1, 3])
    context = w.add("Reshape", [context, w.constant("flat", np.array([2, 16, 32]))], "tokens")
    projected = w.linear(maybe(context, "c"), "out", quantized="c" in quantized and not float_projection)
    w.add("Add", [projected, "x"], "y")
    return w.model("y", {"x": (2, 16, 32)})


def random_input(model: onnx.ModelProto, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
