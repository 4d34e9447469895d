"""Binding each stand-in node to its quantizer: its name, its scale, and which of its calls it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qat.errors import ExportError
from qat.fake_quant import compute_scale
from qat.onnx.translation import DOMAIN, OP_TYPE

AMAX_SUFFIX = "._amax"


@dataclass(frozen=True)
class Site:
    """One place where a quantizer acts.

    Attributes:
        quantizer: module name of the quantizer.
        call: counts the distinct tensors that a shared quantizer sees, in execution order.
        scale: float32, shape () or (C,).
        axis: channel dimension of the tensor, or None.
        narrow: codes start at -127 instead of -128.
        source: parameter that the quantizer acts on, plus `_transposed` where it sees that; "" for activations.
    """

    quantizer: str
    call: int
    scale: NDArray[np.float32]
    axis: int | None
    narrow: bool
    source: str = ""

    @property
    def prefix(self) -> str:
        """Common beginning of the names of this site's nodes, without the slash that follows."""
        return f"{self.quantizer}/call{self.call}" if self.call else self.quantizer


def _amax(value: Any) -> tuple[str, torch.Tensor] | None:
    """Initializer name and value of an amax input, or None where it is computed by the graph.

    A learned amax goes through Abs; the rest keeps the value.
    """
    learned = False
    while value.const_value is None:
        node = value.producer()
        if node is None or node.op_type not in {"Abs", "Identity", "Reshape", "Squeeze"}:
            return None
        learned |= node.op_type == "Abs"
        value = node.inputs[0]
    amax = torch.as_tensor(value.const_value.numpy())
    return value.name, amax.abs() if learned else amax


def _source(value: Any) -> str:
    node = value.producer()
    if node is None:
        return str(value.name) if value.const_value is not None else ""
    transposed = node.op_type == "Transpose" and node.inputs[0].const_value is not None
    return f"{node.inputs[0].name}_transposed" if transposed else ""


def _make_site(node: Any, aliases: Mapping[str, str]) -> Site:
    found = _amax(node.inputs[1])
    if found is None:
        raise ExportError(
            f"the amax of node '{node.name}' is computed inside the model, so no constant scale can be written. "
            "Give fake_quantize a buffer or parameter as amax."
        )
    buffer, amax = found
    name = aliases.get(buffer, buffer.removesuffix(AMAX_SUFFIX))
    low, high = node.attributes["min_bound"].as_int(), node.attributes["max_bound"].as_int()
    if high != 127 or low not in {-127, -128}:
        raise ExportError(
            f"quantizer '{name}' has the codes {low}..{high}; TensorRT's INT8 takes -128..127 or -127..127. "
            "Use num_bits=8, or leave the layer float."
        )
    if not bool(torch.isfinite(amax).all()):
        raise ExportError(f"quantizer '{name}' has a NaN or infinite amax. Calibrate it again before exporting.")
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else None
    scale = compute_scale(amax, high).reshape(() if axis is None else (-1,))
    return Site(name, 0, scale.numpy(), axis, low == -127)


def bind_sites(model: Any, aliases: Mapping[str, str]) -> dict[str, Site]:
    """Detach every stand-in node from its amax and describe it by a Site.

    Two nodes of one quantizer on one tensor are merged. The node keeps its site's prefix in the attribute `site`,
    so that later optimizations cannot mix quantizers that happen to have equal amax.

    Args:
        model: onnx_ir model before optimization; changed in place.
        aliases: state-dict key of an amax -> module name of its quantizer.

    Returns:
        Sites by prefix, in execution order.

    Raises:
        ExportError: no constant amax, codes other than INT8, a NaN or infinite amax.
    """
    from onnxscript import ir

    sites: dict[str, Site] = {}
    first: dict[tuple[Any, ...], Any] = {}
    calls: dict[str, int] = {}
    for node in list(model.graph):
        if node.domain != DOMAIN or node.op_type != OP_TYPE:
            continue
        site = _make_site(node, aliases)
        key = (node.inputs[0], site.quantizer)
        if key in first:
            ir.convenience.replace_all_uses_with(node.outputs[0], first[key].outputs[0])
            model.graph.remove(node, safe=True)
            continue
        first[key] = node
        call = calls.setdefault(site.quantizer, 0)
        calls[site.quantizer] += 1
        site = replace(site, call=call, source=_source(node.inputs[0]))
        sites[site.prefix] = site
        node.attributes["site"] = ir.AttrString("site", site.prefix)
        node.replace_input_with(1, None)
        node.resize_inputs(1)
    return sites
