"""Repairs that change no number, or none that TensorRT computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qat.files import atomic_write
from qat.onnx.lint.graph import (
    LintGraph,
    constant,
    integer,
    is_dequantize,
    is_qdq,
    is_quantize,
    node_name,
    operand,
    scale_of,
)
from qat.onnx.lint.rules.codes import is_shifted_uint8
from qat.onnx.lint.rules.operands import bias_dequantize
from qat.onnx.modelfile import read_ir, read_proto, refusing_invalid, write_ir
from qat.onnx.weights import constant_of, quantize_weight
from qat.onnx.writer import Writer, along


@dataclass(frozen=True)
class FixReport:
    """What `fix` did.

    Attributes:
        path: the file, or None where none was written.
        model: the ModelProto.
        changes: one sentence each; empty where there was nothing to repair.
    """

    path: Path | None
    model: Any
    changes: tuple[str, ...]


def fix(model: Any, out: str | Path | None = None) -> FixReport:
    """Repair what is safe to repair in a Q/DQ file.

    - a missing zero-point of QuantizeLinear becomes an int8 0. TensorRT computes what it did; ONNX Runtime, which took
      the codes for UINT8, now agrees with it;
    - UINT8 with zero-points of 128 becomes INT8 with 0: the same numbers;
    - a quantized bias becomes the float that it stands for;
    - an activation's scale of shape [1] becomes a scalar;
    - float weights behind a Q/DQ pair become INT8 codes behind DequantizeLinear: the same numbers, a quarter of the
      size.

    Repairing twice changes nothing more.

    Args:
        model: path, bytes or ModelProto; unchanged.
        out: file to write, also where nothing was repaired; None writes none.

    Raises:
        ExportError: the file cannot be read, or the repaired one does not pass onnx.checker.
    """
    from onnxscript.ir.passes import common

    proto = read_proto(model)
    loaded = read_ir(proto)
    graph = LintGraph(loaded)
    changes: list[str] = []
    with refusing_invalid(proto):
        for step in (_missing_zero_points, _shifted_codes, _scale_vectors, _biases, _weights):
            changes += step(graph)
    if changes:
        common.RemoveUnusedNodesPass()(loaded)
        proto = write_ir(loaded, out)
    elif out is not None:
        with atomic_write(out) as temporary:
            temporary.write_bytes(proto.SerializeToString(deterministic=True))
    return FixReport(None if out is None else Path(out), proto, tuple(changes))


def _set_input(node: Any, index: int, value: Any) -> None:
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def _dequantizers(node: Any) -> list[Any]:
    return [reader for reader, _ in node.outputs[0].uses() if is_dequantize(reader)]


def _int8(value: Any) -> None:
    from onnxscript import ir

    value.dtype = ir.DataType.INT8


def _missing_zero_points(graph: LintGraph) -> Iterator[str]:
    for node in graph.nodes:
        scale = operand(node, 1)
        if not is_quantize(node) or operand(node, 2) is not None or integer(node, "output_dtype", 0):
            continue
        if scale is None or scale.shape is None or not scale.shape.is_static():
            continue
        zeros = np.zeros(tuple(scale.shape), np.int8)
        zero = Writer(node.graph, node).initializer(f"{scale.name}_zero_point", zeros)
        for item in (node, *_dequantizers(node)):
            _set_input(item, 2, zero)
        _int8(node.outputs[0])
        yield f"'{node_name(node)}' got an int8 zero-point of 0."


def _shifted_codes(graph: LintGraph) -> Iterator[str]:
    for node in filter(is_qdq, graph.nodes):
        stored = constant(node.inputs[0]) if is_dequantize(node) else None
        if not is_shifted_uint8(node) or (is_dequantize(node) and stored is None):
            continue  # the DequantizeLinear of a pair is done together with its QuantizeLinear
        partners = [] if is_dequantize(node) else _dequantizers(node)
        if is_quantize(node) and len(partners) != len(node.outputs[0].uses()):
            continue  # something else reads the codes as UINT8
        if not all(map(is_shifted_uint8, partners)):
            continue
        writer, zero = Writer(node.graph, node), operand(node, 2)
        zeros = writer.initializer(f"{zero.name}_int8", np.zeros(tuple(zero.shape), np.int8))
        if stored is None:
            _int8(node.outputs[0])
        else:
            codes = (stored.astype(np.int16) - 128).astype(np.int8)
            node.replace_input_with(0, writer.initializer(f"{node.inputs[0].name}_int8", codes))
        for item in (node, *partners):
            item.replace_input_with(2, zeros)
        yield f"'{node_name(node)}' is INT8 with zero-point 0 now, was UINT8 with 128."


def _scale_vectors(graph: LintGraph) -> Iterator[str]:
    for node in graph.nodes:
        scale = scale_of(node) if is_quantize(node) else None
        if scale is None or scale.shape != (1,) or graph.is_constant(node.inputs[0]):
            continue
        for item in (node, *_dequantizers(node)):
            writer = Writer(item.graph, item)
            for index in (1, 2):
                value, array = operand(item, index), constant(operand(item, index))
                if array is not None and array.shape == (1,):
                    item.replace_input_with(index, writer.initializer(f"{value.name}_scalar", array.reshape(())))
            item.attributes.pop("axis", None)
        yield f"'{node_name(node)}' has a scalar scale now."


def _dequantized(node: Any) -> np.ndarray[Any, Any] | None:
    """What DequantizeLinear makes of constants, of codes or of floats behind QuantizeLinear."""
    scale = scale_of(node)
    zero = constant(operand(node, 2))
    quantize = node.inputs[0].producer()
    codes = constant(node.inputs[0]) if quantize is None else _codes(quantize)
    if codes is None or scale is None or scale.ndim > 1 or integer(node, "block_size", 0):
        return None
    axis = integer(node, "axis", 1) % max(codes.ndim, 1) if scale.size > 1 else None
    shift = 0 if zero is None else along(zero.astype(np.int64), axis, codes.ndim)
    values = (codes.astype(np.int64) - shift).astype(np.float32)
    real: np.ndarray[Any, Any] = values * along(scale.astype(np.float32).reshape(-1), axis or 0, codes.ndim)
    return real.reshape(codes.shape).astype(scale.dtype)


def _codes(node: Any) -> np.ndarray[Any, Any] | None:
    """INT8 codes that QuantizeLinear makes of a constant; None where they cannot be computed ahead."""
    zero, source = constant(operand(node, 2)), node.inputs[0].producer()
    if not is_quantize(node) or (source is not None and "perm" not in source.attributes):
        return None
    weight = constant_of(node.inputs[0])
    scale = scale_of(node)
    usable = zero is not None and zero.dtype == np.int8 and not zero.any() and scale is not None and scale.ndim < 2
    if weight is None or scale is None or not usable or integer(node, "block_size", 0):
        return None
    if not (np.isfinite(scale) & (scale > 0)).all():
        return None
    axis = integer(node, "axis", 1) % weight.ndim if scale.size > 1 else None
    scale32 = scale.astype(np.float32)
    return quantize_weight(weight, scale32 if axis is not None else scale32.reshape(()), axis, narrow=False)


def _biases(graph: LintGraph) -> Iterator[str]:
    from onnxscript import ir

    for node in list(graph.nodes):
        dequantize = bias_dequantize(graph, node)
        real = None if dequantize is None else _dequantized(dequantize)
        if real is None:
            continue
        old = dequantize.outputs[0]
        bias = Writer(node.graph, node).initializer(f"{old.name}_float", real)
        ir.convenience.replace_all_uses_with(old, bias, replace_graph_outputs=False)
        yield f"the bias of '{node_name(node)}' is float now."


def _weights(graph: LintGraph) -> Iterator[str]:
    from onnxscript import ir

    for node in graph.nodes:
        codes = _codes(node) if is_quantize(node) and not node.outputs[0].is_graph_output() else None
        if codes is None or not node.outputs[0].uses():
            continue
        base = node.inputs[0].name
        stored = Writer(node.graph, node).initializer(f"{base}_int8", codes)
        ir.convenience.replace_all_uses_with(node.outputs[0], stored)
        yield f"the weight '{base}' is stored as INT8 now."
