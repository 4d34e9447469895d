"""Half precision for everything in a Q/DQ file that is not INT8.

TensorRT builds strongly typed networks: a float32 remainder runs in float32. Scales stay float32, with the bits that
they have, and Cast nodes stand between them and half-precision tensors: QuantizeLinear below opset 23 wants input and
scale of one type, and a scale rounded to half would change the INT8 codes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.errors import ExportError
from qat.onnx.modelfile import read_ir, write_ir
from qat.onnx.typing_rules import HalfType, Precision, half_type

_BFLOAT16_OPSET = 22


@dataclass(frozen=True)
class HalfReport:
    """What `to_fp16` made.

    Attributes:
        path: the file, or None where none was written.
        model: the ModelProto.
        dtype: "float16" or "bfloat16".
        half_nodes: nodes that compute in half precision.
        kept: nodes that compute in float32 -> why; QuantizeLinear and DequantizeLinear are not listed.
        casts: number of Cast nodes added.
    """

    path: Path | None
    model: Any
    dtype: str
    half_nodes: tuple[str, ...]
    kept: Mapping[str, str]
    casts: int


def to_fp16(
    model: Any,
    out: str | Path | None = None,
    *,
    keep_io_types: bool | Collection[str] = True,
    dtype: str = "float16",
) -> HalfReport:
    """Rewrite a float32 ONNX file, with or without Q/DQ, so that everything that is not INT8 is half precision.

    Float32 stay: scales; operators whose values leave half precision's range (see `qat.onnx.typing_rules`);
    operators that take no half type in the file's opset; the bodies of If, Loop and Scan; unknown operators.
    TensorRT fuses the casts into the kernels beside them.

    ONNX Runtime's CPU provider runs a float16 file (it computes most operators in float32 and rounds), and has no
    bfloat16 convolution or matrix product: a bfloat16 file is for TensorRT.

    Args:
        model: path, bytes or ModelProto; unchanged. Made by this library or by another exporter.
        out: file to write; None writes none.
        keep_io_types: True leaves graph inputs and outputs float32, False makes them half; a collection of names
            leaves those float32.
        dtype: "float16" or "bfloat16". Bfloat16 convolutions exist from opset 22 on: an older file is raised to it.

    Returns:
        What was made.

    Raises:
        ExportError: the file cannot be read, has no such input or output, cannot be raised to the opset that
            bfloat16 needs, or the result does not pass onnx.checker.
        ValueError: another dtype.
    """
    from onnxscript.ir.passes import common

    half = half_type(dtype)
    loaded = read_ir(model, minimum_opset=_BFLOAT16_OPSET if dtype == "bfloat16" else 0)
    float_io = _float_io(loaded.graph, keep_io_types)
    precision = Precision(loaded, half, float_io)
    casts = _Casts(loaded.graph, half)
    _retype(loaded.graph, half, precision, float_io, casts)
    common.RemoveUnusedNodesPass()(loaded)
    proto = write_ir(loaded, out)
    return HalfReport(
        path=None if out is None else Path(out),
        model=proto,
        dtype=dtype,
        half_nodes=tuple(_name(node) for node in precision.half),
        kept={_name(node): why for node, why in precision.kept.items()},
        casts=casts.count,
    )


def _name(node: Any) -> str:
    return str(node.name or node.outputs[0].name)


def _float_io(graph: Any, keep: bool | Collection[str]) -> set[Any]:
    """Graph inputs and outputs that stay float32."""
    values = [*graph.inputs, *graph.outputs]
    if isinstance(keep, bool):
        return set(values) if keep else set()
    unknown = sorted(set(keep) - {value.name for value in values})
    if unknown:
        raise ExportError(
            f"keep_io_types names {', '.join(unknown)}; the file has the inputs and outputs "
            f"{', '.join(str(value.name) for value in values)}."
        )
    return {value for value in values if value.name in keep}


def _retype(graph: Any, half: HalfType, precision: Precision, float_io: set[Any], casts: _Casts) -> None:
    """Give every value its type, then put a cast or a converted constant where a consumer needs the other one."""
    from onnxscript import ir

    real = ir.DataType.FLOAT
    stored = dict.fromkeys([*graph.inputs, *graph.initializers.values()])
    floats = [value for value in stored if value.dtype == real]
    becomes_half = {value for value in graph.inputs if value.dtype == real and value not in float_io}
    for node in graph:
        slots = precision.half[node].outputs if node in precision.half else ("",) * len(node.outputs)
        for value, slot in zip(node.outputs, slots, strict=True):
            if value.dtype == real:
                floats.append(value)
                if slot:
                    becomes_half.add(value)
    for value in floats:
        uses = list(value.uses())
        is_half = value in becomes_half
        if is_half:
            value.dtype = half.dtype
        for user, index in uses:
            if user in precision.indifferent:
                continue
            wants_half = user in precision.half and bool(precision.half[user].inputs[index])
            if wants_half != is_half:
                user.replace_input_with(index, casts.of(value, half.dtype if wants_half else real))
        if value.is_graph_output():
            _retype_output(graph, value, half.dtype if value not in float_io else real, casts)


def _retype_output(graph: Any, value: Any, wanted: Any, casts: _Casts) -> None:
    """Let the graph return the value in the type wanted, under the name it has."""
    if value.dtype == wanted:
        return
    name = value.name
    value.name = f"{name}_{value.dtype.name.lower()}"
    cast = casts.of(value, wanted)
    cast.name = name
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = cast


class _Casts:
    """One cast, or converted constant, for each value and type."""

    def __init__(self, graph: Any, half: HalfType) -> None:
        self._graph, self._half = graph, half
        self._made: dict[tuple[Any, Any], Any] = {}
        self._names = {value.name for node in graph for value in node.outputs} | set(graph.initializers)
        self.count = 0

    def _name(self, base: str) -> str:
        while base in self._names:
            base = f"{base}_"
        self._names.add(base)
        return base

    def of(self, value: Any, dtype: Any) -> Any:
        """The value in another type."""
        if (value, dtype) not in self._made:
            constant = value.const_value is not None and not value.is_graph_input()
            self._made[value, dtype] = self._constant(value, dtype) if constant else self._cast(value, dtype)
        return self._made[value, dtype]

    def _constant(self, value: Any, dtype: Any) -> Any:
        from onnxscript import ir

        name = self._name(f"{value.name}_{dtype.name.lower()}")
        array = value.const_value.numpy().astype(dtype.numpy())
        tensor = ir.tensor(array, dtype=dtype, name=name)
        made = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self._graph.register_initializer(made)
        return made

    def _cast(self, value: Any, dtype: Any) -> Any:
        from onnxscript import ir

        kind = dtype.name.lower()
        node = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=f"{value.name}/{kind}/Cast")
        made = node.outputs[0]
        made.name, made.dtype, made.shape = self._name(f"{value.name}_{kind}"), dtype, value.shape
        producer = value.producer()
        if producer is not None:
            self._graph.insert_after(producer, node)
        else:
            self._graph.insert_before(self._graph[0], node)
        self.count += 1
        return made
