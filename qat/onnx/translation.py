"""Translations that torch.onnx.export lacks: `qat::fake_quantize`, and adaptive average pooling in 3-D.

`qat::fake_quantize` enters the graph as a stand-in node that the lowering turns into Q/DQ.

torch.onnx.export optimizes the graph and, below its own minimum opset, converts it. A Q/DQ pair with its scale
as graph arithmetic would not come through that unharmed: constants are folded and renamed, equal amax buffers
are merged under one layer's name, weight Q/DQ may be folded back to floats. An operator of our own domain is
opaque to all of it, and belongs to no ONNX opset that could disagree with `opset_version`. `qat.onnx.lowering`
replaces every one of them; none reaches a file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

import qat.fake_quant  # noqa: F401  (registers torch.ops.qat.fake_quantize)

DOMAIN = "qat.standin"
OP_TYPE = "FakeQuantize"
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]


@cache
def _standin() -> Any:
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    attribute, formal = OpSchema.Attribute, OpSchema.FormalParameter
    schema = OpSchema(
        OP_TYPE,
        DOMAIN,
        1,
        inputs=[formal("x", "T"), formal("amax", "tensor(float)")],
        outputs=[formal("y", "T")],
        type_constraints=[("T", _FLOATS, "")],
        attributes=[
            attribute("axis", OpSchema.AttrType.INT, "", required=False),
            attribute("min_bound", OpSchema.AttrType.INT, "", required=True),
            attribute("max_bound", OpSchema.AttrType.INT, "", required=True),
        ],
    )
    return Op(Opset(DOMAIN, 1), OP_TYPE, schema)


def _translate(x: Any, amax: Any, axis: int | None = None, min_bound: int = -128, max_bound: int = 127) -> Any:
    optional = {} if axis is None else {"axis": axis}
    return _standin()(x, amax, min_bound=min_bound, max_bound=max_bound, **optional)


def _average_bins(size: int, bins: int) -> torch.Tensor:
    """Matrix (bins, size) that averages adaptive pooling's bins: from floor(i*size/bins) to ceil((i+1)*size/bins)."""
    matrix = torch.zeros(bins, size)
    for i in range(bins):
        start, end = i * size // bins, -(-(i + 1) * size // bins)
        matrix[i, start:end] = 1 / (end - start)
    return matrix


def _translate_adaptive_avg_pool3d(x: Any, output_size: Any) -> Any:
    """One AveragePool where every bin has the same size, else a product with a matrix along each axis."""
    from onnxscript import opset18

    op: Any = opset18
    sizes, bins = list(x.shape)[-3:], [int(size) for size in output_size]
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"AdaptiveAvgPool3d to {bins} needs a fixed depth, height and width, not {sizes}")
    if len(x.shape) == 5 and not any(size % count for size, count in zip(sizes, bins, strict=True)):
        window = [size // count for size, count in zip(sizes, bins, strict=True)]
        return op.AveragePool(x, kernel_shape=window, strides=window)
    kept = [0] * (len(x.shape) - 3)
    depth, height, width = (_average_bins(size, count) for size, count in zip(sizes, bins, strict=True))
    x = op.MatMul(x, op.Constant(value=_tensor(width.T)))
    x = op.MatMul(op.Constant(value=_tensor(height)), x)
    x = op.Reshape(x, op.Constant(value_ints=[*kept, sizes[0], bins[1] * bins[2]]))
    x = op.MatMul(op.Constant(value=_tensor(depth)), x)
    return op.Reshape(x, op.Constant(value_ints=[*kept, *bins]))


def _tensor(matrix: torch.Tensor) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(matrix.contiguous().numpy())


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The `custom_translation_table` for torch.onnx.export."""
    return {
        torch.ops.qat.fake_quantize.default: _translate,
        torch.ops.aten._adaptive_avg_pool3d.default: _translate_adaptive_avg_pool3d,
    }
