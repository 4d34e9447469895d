"""Rules on scales: values, shapes, and the two of a pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qat.onnx.lint.findings import Issue, Rule, Severity
from qat.onnx.lint.graph import (
    LintGraph,
    dims,
    integer,
    is_dequantize,
    is_qdq,
    is_quantize,
    node_name,
    operand,
    scale_of,
    site,
)


def scale_value(graph: LintGraph) -> Iterator[Issue]:
    """Zero, negative, NaN or infinite."""
    seen = set()
    for node in filter(is_qdq, graph.nodes):
        scale = scale_of(node)
        if scale is None or node.inputs[1] in seen:
            continue
        seen.add(node.inputs[1])
        values = scale.astype(np.float64).reshape(-1)
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            where = f"scale {values[bad[0]]:g}"
            if values.size > 1:
                where = (
                    f"{bad.size} of {values.size} scales are not positive, the first is channel {bad[0]} with {where}"
                )
            yield Issue(
                node_name(node),
                f"{where}; TensorRT's parser refuses scales that are not positive, and an infinite one gives zeros.",
                f"The channel is dead or was never calibrated: calibrate '{site(node)}' again.",
            )


def scale_computed(graph: LintGraph) -> Iterator[Issue]:
    """Dynamic quantization."""
    for node in filter(is_qdq, graph.nodes):
        if not graph.is_constant(operand(node, 1)) or not graph.is_constant(operand(node, 2)):
            yield Issue(
                node_name(node),
                "its scale or zero-point is computed from the input; TensorRT needs both when it builds, and its "
                "parser refuses the file or crashes.",
                "Quantize statically: store the calibrated scale.",
            )


def _channels(node: Any) -> int | None:
    shape = dims(node.inputs[0])
    axis = integer(node, "axis", 1)
    return None if shape is None or not -len(shape) <= axis < len(shape) else shape[axis]


def scale_shape(graph: LintGraph) -> Iterator[Issue]:
    """Anything but a scalar, or one scale for each channel."""
    seen = set()
    for node in filter(is_qdq, graph.nodes):
        scale = scale_of(node)
        if scale is None or node.inputs[1] in seen:
            continue
        seen.add(node.inputs[1])
        if scale.ndim > 1 or integer(node, "block_size", 0):
            yield Issue(
                node_name(node),
                f"its scale has the shape {list(scale.shape)}: TensorRT takes blocks for weights of 4 bits and for "
                "FP8, and fails to parse or to build them for INT8.",
                "Use one scale a tensor, or one a channel.",
            )
            continue
        channels = _channels(node)
        if scale.size > 1 and channels is not None and channels != scale.size:
            yield Issue(
                node_name(node),
                f"it has {scale.size} scales and {channels} channels along axis {integer(node, 'axis', 1)}; TensorRT's "
                "parser refuses the file.",
                "Make scale and axis fit the tensor.",
            )


def scale_vector(graph: LintGraph) -> Iterator[Issue]:
    """One scale, but in a vector: per-channel to TensorRT."""
    for node in graph.nodes:
        scale = scale_of(node) if is_quantize(node) else None
        if scale is not None and scale.shape == (1,) and not graph.is_constant(node.inputs[0]):
            yield Issue(
                node_name(node),
                "its single scale has the shape [1]; TensorRT takes an activation's vector for one scale a channel and "
                "runs the layers that read it in float, without a word.",
                "Store the scale as a scalar.",
                repairable=True,
            )


def differ(first: NDArray[Any] | None, second: NDArray[Any] | None) -> bool:
    """Whether both scales are known and not the same."""
    if first is None or second is None:
        return False
    return not np.array_equal(first.reshape(-1), second.reshape(-1), equal_nan=True)


def pair_scales(graph: LintGraph) -> Iterator[Issue]:
    """A DequantizeLinear with another scale than its QuantizeLinear."""
    for node in filter(is_dequantize, graph.nodes):
        quantize = node.inputs[0].producer()
        if not is_quantize(quantize):
            continue
        first, second = scale_of(quantize), scale_of(node)
        if differ(first, second):
            yield Issue(
                node_name(node),
                f"its scale differs from that of '{node_name(quantize)}', which makes its codes, so the pair changes "
                "the size of the tensor; TensorRT builds it without a word.",
                "Give both the same scale.",
            )


RULES = (
    Rule("scale-value", Severity.ERROR, "zero, negative, NaN or infinite scale", scale_value),
    Rule("scale-computed", Severity.ERROR, "scale that depends on the input", scale_computed),
    Rule("scale-shape", Severity.ERROR, "scale of a shape that fits nothing", scale_shape),
    Rule("scale-vector", Severity.WARNING, "activation scale of shape [1]", scale_vector),
    Rule("pair-scales", Severity.WARNING, "two scales in one Q/DQ pair", pair_scales),
)
