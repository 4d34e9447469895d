"""Turning stand-in nodes into QuantizeLinear and DequantizeLinear.

The pair is written in the form that every opset from 13 on shares: float32 scale, explicit int8 zero-point,
`axis` where there is one. Activations other than float32 are cast around the pair, so scales are never rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qat.onnx.binding import Site
from qat.onnx.translation import DOMAIN
from qat.onnx.weights import constant_of, lower_weight
from qat.onnx.writer import Writer, along


def lower_sites(model: Any, sites: Mapping[str, Site], int8_weights: bool) -> tuple[str, ...]:
    """Replace every stand-in node.

    Args:
        model: onnx_ir model after optimization; changed in place.
        sites: result of `bind_sites`.
        int8_weights: store weights as INT8; False keeps floats in front of a QuantizeLinear.

    Returns:
        Prefixes of the sites that are in the graph still: the optimizer drops what no output needs.
    """
    from onnxscript import ir

    graph, present = model.graph, []
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        site, x, result = sites[node.attributes["site"].as_string()], node.inputs[0], node.outputs[0]
        present.append(site.prefix)
        writer, weight = Writer(graph, node), constant_of(x)
        if weight is None:
            lowered = _lower_activation(writer, site, x)
            ir.convenience.replace_all_uses_with(result, lowered, replace_graph_outputs=True)
        else:
            lower_weight(writer, site, x, weight, result, int8_weights)
        graph.remove(node, safe=True)
    model.opset_imports.pop(DOMAIN, None)
    return tuple(present)


def _lower_activation(writer: Writer, site: Site, x: Any) -> Any:
    from onnxscript import ir

    dtype, real = x.dtype, ir.DataType.FLOAT
    if dtype not in {None, real}:
        x = writer.node(f"{site.prefix}/in/Cast", [x], real, x.shape, to=int(real))
    pair = writer.scale_and_zero(site)
    if site.narrow:  # QuantizeLinear saturates at -128, so what would become -128 is cut off in front of it
        floor = along(np.asarray(site.scale * np.float32(-127)), site.axis, len(x.shape))
        x = writer.node(f"{site.prefix}/Max", [x, writer.initializer(f"{site.quantizer}.floor", floor)], real, x.shape)
    codes = writer.quantize(site.prefix, x, pair, site.axis)
    return writer.dequantize(site.prefix, codes, pair, site.axis, dtype)
