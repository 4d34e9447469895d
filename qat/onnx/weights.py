"""Quantized weights in the file: INT8 codes behind a DequantizeLinear, or floats behind a Q/DQ pair."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qat.onnx.binding import Site
from qat.onnx.writer import FloatArray, Writer, along


def quantize_weight(weight: FloatArray, scale: FloatArray, axis: int | None, narrow: bool = True) -> NDArray[np.int8]:
    """INT8 codes of a weight: `clip(rint(weight / scale), -127, 127)`, float32, half to even.

    Args:
        weight: any shape.
        scale: shape (), or (weight.shape[axis],).
        axis: channel dimension, or None.
        narrow: False clips at -128.

    Returns:
        Codes of the weight's shape; times scale they are bit for bit what fake quantization gives in torch.
    """
    codes = np.rint(weight.astype(np.float32) / along(scale, axis, weight.ndim))
    clipped: NDArray[np.int8] = np.clip(codes, -127 if narrow else -128, 127).astype(np.int8)
    return clipped


def constant_of(value: Any) -> NDArray[Any] | None:
    """The array of an initializer or of a transposed initializer; None for anything computed at run time."""
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    node = value.producer()
    if node is None or node.op_type != "Transpose" or node.inputs[0].const_value is None:
        return None
    return np.transpose(node.inputs[0].const_value.numpy(), node.attributes["perm"].as_ints())


def lower_weight(writer: Writer, site: Site, x: Any, weight: NDArray[Any], result: Any, fold: bool) -> None:
    """Replace `result`, the stand-in's output on a constant, and every Transpose of it.

    Transposes are folded into the stored weight and the axis moves with them, so that DequantizeLinear feeds the
    operator, as TensorRT wants it.

    Args:
        writer: writes in front of the stand-in.
        site: the quantizer.
        x: the stand-in's input.
        weight: the value of x.
        result: the stand-in's output.
        fold: store INT8 codes; False stores floats in front of a QuantizeLinear.
    """
    from onnxscript import ir

    done: dict[tuple[int, ...], Any] = {}
    for consumer in [node for node, _ in result.uses()]:
        if consumer.op_type != "Transpose" or "perm" not in consumer.attributes:
            continue
        perm = tuple(consumer.attributes["perm"].as_ints())
        if perm not in done:
            done[perm] = _store(writer, site, x, weight, perm, fold)
        ir.convenience.replace_all_uses_with(consumer.outputs[0], done[perm], replace_graph_outputs=True)
        writer.graph.remove(consumer, safe=True)
    if result.uses() or result.is_graph_output():
        stored = _store(writer, site, x, weight, None, fold)
        ir.convenience.replace_all_uses_with(result, stored, replace_graph_outputs=True)


def _store(writer: Writer, site: Site, x: Any, weight: NDArray[Any], perm: tuple[int, ...] | None, fold: bool) -> Any:
    prefix, axis, stored = site.prefix, site.axis, weight.astype(np.float32)
    base = site.source or x.name
    if perm is not None:
        prefix = f"{prefix}/perm_{'_'.join(map(str, perm))}"
        base = f"{base}_transposed"
        stored = np.ascontiguousarray(stored.transpose(perm))
        axis = None if axis is None else perm.index(axis)
    pair = writer.scale_and_zero(site)
    if fold:
        codes = writer.initializer(f"{base}_int8", quantize_weight(stored, site.scale, axis, site.narrow))
    else:
        if site.narrow:  # QuantizeLinear saturates at -128; a weight that far beyond amax has the code -127
            stored = np.maximum(stored, along(np.asarray(site.scale * np.float32(-127)), axis, stored.ndim))
        codes = writer.quantize(prefix, writer.initializer(base, stored), pair, axis)
    return writer.dequantize(prefix, codes, pair, axis, x.dtype)
