"""Cutting a Q/DQ file at its quantizers, so that each float stretch between them can be compared by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_SITE = re.compile(
    r"(?P<quantizer>[^/]+)(/call(?P<call>\d+))?(/perm_(?P<perm>[\d_]+))?/(Max|QuantizeLinear|DequantizeLinear)(_\d+)?"
)
"""Names of the nodes that `lowering` and `weights` write for a quantizer; others may carry its name as a scope."""


@dataclass(frozen=True)
class FileSite:
    """One quantizer in a file.

    Attributes:
        quantizer: module name.
        call: which distinct tensor of a shared quantizer.
        perm: transposition that was folded into a weight, or None.
        entry: value that goes in.
        result: value that comes out.
        weight: the entry is a stored constant.
        feed: name of the graph input that replaces the entry in the cut file.
    """

    quantizer: str
    call: int
    perm: tuple[int, ...] | None
    entry: str
    result: str
    weight: bool
    feed: str


def find_sites(proto: Any, quantizers: Iterable[str]) -> list[FileSite]:
    """Sites of the named quantizers in the order in which the file executes them."""
    known = set(quantizers)
    constants = {tensor.name for tensor in proto.graph.initializer}
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for node in proto.graph.node:
        match = _SITE.fullmatch(node.name)
        if match is not None and match["quantizer"] in known:
            key = (match["quantizer"], match["call"] or "0", match["perm"] or "")
            groups.setdefault(key, []).append(node)
    sites = []
    for (quantizer, call, perm), nodes in groups.items():
        entry = nodes[0].input[0]
        sites.append(
            FileSite(
                quantizer=quantizer,
                call=int(call),
                perm=tuple(int(dim) for dim in perm.split("_")) if perm else None,
                entry=entry,
                result=nodes[-1].output[0],
                weight=entry in constants,
                feed=f"{quantizer}/call{call}/feed",
            )
        )
    return sites


def cut(proto: Any, sites: Iterable[FileSite], ranks: dict[str, int]) -> Any:
    """A copy of the file in which each site reads a graph input instead of its entry.

    Entries and results become graph outputs. The quantizers still quantize, so consumers get the file's own
    quantized values; only the chain of roundings from one quantizer to the next is broken.

    Args:
        proto: ModelProto; unchanged.
        sites: those that take part; none of a weight.
        ranks: feed -> number of dimensions.

    Returns:
        ModelProto.
    """
    from onnx import ModelProto, TensorProto, ValueInfoProto, helper

    copy = ModelProto()
    copy.CopyFrom(proto)
    outputs = {value.name for value in copy.graph.output}
    inputs = {value.name for value in copy.graph.input}
    chosen = list(sites)
    feeds = {(site.quantizer, site.call): site.feed for site in chosen}
    for node in copy.graph.node:
        match = _SITE.fullmatch(node.name)
        if match is None or match["perm"]:
            continue
        key = (match["quantizer"], int(match["call"] or 0))
        entries = [site.entry for site in chosen if (site.quantizer, site.call) == key]
        if entries and node.input[0] == entries[0]:
            node.input[0] = feeds[key]
    for site in chosen:
        dims = [None] * ranks[site.feed]
        copy.graph.input.append(helper.make_tensor_value_info(site.feed, TensorProto.FLOAT, dims))
        for name in (site.entry, site.result):
            if name not in outputs and name not in inputs:
                copy.graph.output.append(ValueInfoProto(name=name))
                outputs.add(name)
    return copy


class Weights:
    """Single weights of a file, dequantized one by one, since all of them are as large as the float model."""

    def __init__(self, proto: Any) -> None:
        self.proto = proto
        self.producers = {name: node for node in proto.graph.node for name in node.output}
        self.constants = {tensor.name: tensor for tensor in proto.graph.initializer}

    def model(self, site: FileSite) -> Any:
        """ModelProto without inputs whose one output is the site's result."""
        from onnx import ValueInfoProto, helper

        nodes: list[Any] = []
        constants: dict[str, Any] = {}
        pending = [site.result]
        while pending:
            name = pending.pop()
            if name in self.constants:
                constants[name] = self.constants[name]
            elif name in self.producers:
                nodes.insert(0, self.producers[name])
                pending += nodes[0].input
        graph = helper.make_graph(nodes, "weight", [], [ValueInfoProto(name=site.result)], list(constants.values()))
        return helper.make_model(graph, opset_imports=self.proto.opset_import, ir_version=self.proto.ir_version)
