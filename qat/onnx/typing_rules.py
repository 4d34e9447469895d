"""Which nodes of a file stay float32 when the rest becomes half precision, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
# TensorRT fuses casts into the neighbouring kernel: float32 for these costs no kernel, and attention stays one.
_GROWING = frozenset(
    {"ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd", "ReduceLogSum"}
    | {"ReduceLogSumExp", "Pow", "Exp", "CumSum", "LogSoftmax", "Softplus", "Einsum", "Det"}
)
_NORMS = frozenset(
    {"LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "LpNormalization"}
    | {"BatchNormalization", "MeanVarianceNormalization"}
)
_COORDINATES = frozenset({"Range", "GridSample", "AffineGrid", "RoiAlign", "NonMaxSuppression", "STFT", "DFT"})
_ALWAYS = {
    **dict.fromkeys(_NORMS, "normalization: statistics and small denominators need float32's range"),
    **dict.fromkeys(_COORDINATES, "coordinates need float32's digits"),
    **dict.fromkeys(_GROWING, "sums and powers leave half precision's range"),
    **dict.fromkeys({"Softmax", "Hardmax"}, "softmax: its exponentials are summed"),
}
_GROWN_CARRIERS = frozenset({"Add", "Sqrt", "Reciprocal", "Log", "Neg", "Abs", "Max", "Min", "Clip"})
_GROWN_CLOSERS = frozenset({"Div", "Mul", "Sub"})
# AveragePool between two quantizers runs in INT8 in TensorRT; a cast at either side keeps it from that.
_MOVES = frozenset(
    {"Reshape", "Transpose", "Slice", "Gather", "Concat", "Expand", "Unsqueeze", "Squeeze", "Flatten", "Identity"}
    | {"Split", "Tile", "DepthToSpace", "SpaceToDepth", "MaxPool", "AveragePool"}
)
_WIDE_CARRIERS = _MOVES | {"Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Neg", "Abs"}
_WIDE_CLOSERS = frozenset({"Clip", "Sin", "Cos", "Sigmoid", "Tanh"})
_READS_ANY = frozenset({"Cast", "Shape", "Size"})
_LARGE_TYPES = frozenset({"INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "DOUBLE"})


@dataclass(frozen=True)
class HalfType:
    """A half-precision type and what it can hold.

    Attributes:
        name: "float16" or "bfloat16".
        dtype: its onnx_ir DataType.
        largest: largest finite value.
        smallest: smallest positive normal value.
    """

    name: str
    dtype: Any
    largest: float
    smallest: float


def half_type(name: str) -> HalfType:
    """Look a half-precision type up.

    Raises:
        ValueError: another name than float16 and bfloat16.
    """
    from onnxscript import ir

    if name == "float16":
        return HalfType(name, ir.DataType.FLOAT16, 65504.0, 2.0**-14)
    if name == "bfloat16":
        return HalfType(name, ir.DataType.BFLOAT16, 3.3895313892515355e38, 2.0**-126)
    raise ValueError(f"dtype={name!r} is not a half-precision type. Use 'float16' or 'bfloat16'.")


@dataclass(frozen=True)
class Slots:
    """For each input and each output of a node: its type parameter where that may be half, else an empty string."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def half_slots(node: Any, opsets: Mapping[str, int], half: HalfType) -> Slots | None:
    """What the ONNX specification of the file's opset lets a node take; None for an operator outside of it."""
    from onnx import defs

    try:
        schema = defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
    except defs.SchemaError:
        return None
    types = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    free = {name for name, allowed in types.items() if {"tensor(float)", f"tensor({half.name})"} <= allowed}

    def parameters(formal: Any, count: int) -> tuple[str, ...]:
        names = [formal[min(index, len(formal) - 1)].type_str for index in range(count)]
        return tuple(name if name in free else "" for name in names)

    return Slots(parameters(schema.inputs, len(node.inputs)), parameters(schema.outputs, len(node.outputs)))


def _is_float(value: Any) -> bool:
    from onnxscript import ir

    return value is not None and value.dtype == ir.DataType.FLOAT


def _pools_a_map(node: Any) -> bool:
    """A mean over several dimensions: global pooling, whose result lies within the values of the map.

    In float32 its result would need a cast kernel of its own in front of the squeeze convolution.
    """
    if node.op_type != "ReduceMean":
        return False
    if "axes" in node.attributes:
        return len(node.attributes["axes"].as_ints()) > 1
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    return axes is not None and axes.const_value is not None and axes.const_value.size > 1


def _behind_scales(graph: Any) -> set[Any]:
    """Nodes that compute the scale of a quantizer."""
    found: set[Any] = set()
    pending = [value for node in graph if node.op_type in _QUANTIZERS for value in node.inputs[1:2]]
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in found:
            found.add(node)
            pending += node.inputs
    return found


class Precision:
    """The decision for every node of a graph that touches float32.

    Attributes:
        half: node -> its slots, for nodes that become half precision.
        kept: node -> why it stays float32; QuantizeLinear and DequantizeLinear are not listed.
        indifferent: nodes that read either type and return neither.
    """

    def __init__(self, model: Any, half_type: HalfType, float_io: Collection[Any]) -> None:
        self.half: dict[Any, Slots] = {}
        self.kept: dict[Any, str] = {}
        self.indifferent: set[Any] = set()
        self._type, self._float_io = half_type, float_io
        self._grown: set[Any] = set()
        self._wide: set[Any] = set()
        makes_scale = _behind_scales(model.graph)
        for node in model.graph:
            if node in makes_scale:
                self.kept[node] = "makes a scale"
            elif any(_is_float(value) for value in (*node.inputs, *node.outputs)):
                self._decide(node, model.opset_imports)
        self._keep_moves_between_floats()

    def _decide(self, node: Any, opsets: Mapping[str, int]) -> None:
        if node.op_type in _QUANTIZERS:
            return
        if node.op_type in _READS_ANY and not any(map(_is_float, node.outputs)):
            self.indifferent.add(node)
            return
        slots = half_slots(node, opsets, self._type)
        why = self._fixed(node, slots) or self._range(node)
        if why or slots is None:
            self.kept[node] = why
        else:
            self.half[node] = slots

    def _fixed(self, node: Any, slots: Slots | None) -> str:
        from onnxscript import ir

        if any(a.type in {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS} for a in node.attributes.values()):
            return "control flow: its bodies are left as they are"
        if slots is None:
            return f"operator {node.domain or 'ai.onnx'}::{node.op_type} is not in the ONNX specification"
        read = [value for value in node.outputs if value.uses() or value.is_graph_output()]
        if any(value is not None and value.dtype is None for value in (*node.inputs, *read)):
            return "a tensor beside it has an unknown type"
        outputs = [name for name, value in zip(slots.outputs, node.outputs, strict=True) if _is_float(value)]
        inputs = [name for name, value in zip(slots.inputs, node.inputs, strict=True) if _is_float(value) and name]
        if any(name not in inputs for name in outputs) or not (outputs or inputs):
            source = node.inputs[0].dtype if node.op_type == "Cast" else None
            if source is not None and source.name in _LARGE_TYPES:
                self._wide.update(node.outputs)
            return f"in this opset its type is fixed, or {self._type.name} is none that it takes"
        return ""

    def _range(self, node: Any) -> str:
        """Why the values do not fit half precision; marks outputs whose consumers are affected too."""
        inputs = [value for value in node.inputs if value is not None]
        pools = _pools_a_map(node) and self._grown.isdisjoint(inputs) and self._wide.isdisjoint(inputs)
        why = "" if pools else _ALWAYS.get(node.op_type, "")
        if node.op_type in _GROWING and not pools:
            self._grown.update(node.outputs)
        elif not self._grown.isdisjoint(inputs) and node.op_type in _GROWN_CARRIERS | _GROWN_CLOSERS:
            why = "computes with sums or powers that leave half precision's range"
            if node.op_type in _GROWN_CARRIERS:
                self._grown.update(node.outputs)
        constants = "" if why else next(filter(None, map(self._constant, inputs)), "")
        if constants or (not self._wide.isdisjoint(inputs) and node.op_type in _WIDE_CARRIERS):
            self._wide.update(node.outputs)
            why = why or constants or "computes with values that may exceed half precision's range"
        elif not self._wide.isdisjoint(inputs) and node.op_type in _WIDE_CLOSERS:
            why = why or "reads values that may exceed half precision's range"
        return why

    def _constant(self, value: Any) -> str:
        if value.const_value is None or not _is_float(value):
            return ""
        array = np.abs(value.const_value.numpy())
        finite = array[np.isfinite(array)]
        if finite.size and float(finite.max()) > self._type.largest:
            return f"constant '{value.name}' holds {float(finite.max()):g}, more than {self._type.name} can"
        if array.size == 1 and 0 < float(array.max()) < self._type.smallest:
            return f"constant '{value.name}' is {float(array.max()):g}, less than {self._type.name} holds accurately"
        return ""

    def _keep_moves_between_floats(self) -> None:
        """Where all neighbours are float32, as between two quantizers, a move in half would only add casts."""
        candidates = {node for node in self.half if node.op_type in _MOVES}
        while True:
            out = {node for node in candidates if not self._between_floats(node, candidates)}
            if not out:
                break
            candidates -= out
        for node in candidates:
            del self.half[node]
            self.kept[node] = "moves or pools data between float32 tensors"

    def _between_floats(self, node: Any, candidates: set[Any]) -> bool:
        for value in filter(_is_float, node.inputs):
            producer = value.producer()
            if producer is None:
                if value.const_value is None and value not in self._float_io:
                    return False
            elif producer in self.half and producer not in candidates:
                return False
        for value in filter(_is_float, node.outputs):
            if value.is_graph_output() and value not in self._float_io:
                return False
            if any(user in self.half and user not in candidates for user, _ in value.uses()):
                return False
        return True
