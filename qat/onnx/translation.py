"""How `qat::fake_quantize` enters the ONNX graph: as a stand-in node that the lowering turns into Q/DQ.

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


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The `custom_translation_table` for torch.onnx.export."""
    return {torch.ops.qat.fake_quantize.default: _translate}
