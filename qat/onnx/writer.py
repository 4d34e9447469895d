"""Adding initializers and named nodes to an onnx_ir graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qat.onnx.binding import Site

FloatArray = NDArray[np.float32]


def along(values: FloatArray, axis: int | None, rank: int) -> FloatArray:
    """Per-tensor or per-channel values in a shape that broadcasts against a tensor of `rank` dimensions."""
    return values if axis is None else values.reshape([-1 if dim == axis else 1 for dim in range(rank)])


@dataclass(frozen=True)
class Writer:
    """Writes what replaces one stand-in node, in front of it.

    Attributes:
        graph: onnx_ir graph, changed in place.
        anchor: node that new nodes precede.
    """

    graph: Any
    anchor: Any

    def initializer(self, name: str, array: NDArray[Any]) -> Any:
        """Value that holds `array`; an equal one of that name is reused, another one gets a number."""
        from onnxscript import ir

        known, unique, count = self.graph.initializers, name, 0
        while unique in known:
            present = known[unique].const_value.numpy()
            if present.dtype == array.dtype and np.array_equal(present, array):
                return known[unique]
            count += 1
            unique = f"{name}_{count}"
        tensor = ir.tensor(array, name=unique)
        shape, kind = ir.Shape(array.shape), ir.TensorType(tensor.dtype)
        value = ir.Value(name=unique, type=kind, shape=shape, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def node(self, name: str, inputs: Sequence[Any], dtype: Any, shape: Any, **attributes: Any) -> Any:
        """Output of a new node; the operator is the last part of its name, `<site>/<operator>`."""
        from onnxscript import ir

        made = ir.node(name.rpartition("/")[2], inputs, attributes=attributes or None, name=name)
        made.outputs[0].name = f"{name}_output"
        made.outputs[0].dtype = dtype
        made.outputs[0].shape = shape
        self.graph.insert_before(self.anchor, made)
        return made.outputs[0]

    def scale_and_zero(self, site: Site) -> list[Any]:
        """The scale, float32 with the quantizer's own bits, and an int8 zero-point of the same shape."""
        scale = self.initializer(f"{site.quantizer}.scale", site.scale)
        return [scale, self.initializer(f"{site.quantizer}.zero_point", np.zeros(site.scale.shape, np.int8))]

    def quantize(self, prefix: str, x: Any, pair: list[Any], axis: int | None) -> Any:
        """Output of a QuantizeLinear node on a float32 value."""
        from onnxscript import ir

        attributes = {} if axis is None else {"axis": axis}
        return self.node(f"{prefix}/QuantizeLinear", [x, *pair], ir.DataType.INT8, x.shape, **attributes)

    def dequantize(self, prefix: str, codes: Any, pair: list[Any], axis: int | None, dtype: Any) -> Any:
        """Output of a DequantizeLinear node, cast to `dtype` where the model is not float32."""
        from onnxscript import ir

        attributes = {} if axis is None else {"axis": axis}
        name = f"{prefix}/DequantizeLinear"
        real = self.node(name, [codes, *pair], ir.DataType.FLOAT, codes.shape, **attributes)
        if dtype in {None, ir.DataType.FLOAT}:
            return real
        return self.node(f"{prefix}/out/Cast", [real], dtype, codes.shape, to=int(dtype))
