"""Putting the quantizers into the model, in place."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from qat.convert import convert_layer
from qat.descriptor import QUANT_DESC_8BIT_PER_TENSOR, QUANT_DESC_8BIT_WEIGHT_PER_TENSOR, QuantDescriptor
from qat.fake_quant_reuse import LastResult
from qat.placement.attention import QuantAttention, QuantMultiheadAttention, softmax_descriptor
from qat.placement.deciding import CONTAINERS, IN_CALLEE, edit_for
from qat.placement.decisions import Placement
from qat.placement.demands import Demand, Holder, demands, grouped
from qat.placement.graph import Node
from qat.placement.padding import PADDING
from qat.placement.rewriting import apply_edits
from qat.placement.runs import QuantRuns
from qat.placement.source import Edit
from qat.quantizer import QuantizerState, TensorQuantizer, named_quantizers

_SITE_NAMES = {("matmul", 0): "matmul_input", ("matmul", 1): "matmul_other", ("zero_pad", 0): "pad_input"}


@dataclass
class _Insertion:
    """Descriptors, and the edits collected for each module."""

    input_desc: QuantDescriptor | None
    weight_desc: QuantDescriptor | None
    device: torch.device | None
    modules: dict[str, nn.Module]
    edits: dict[nn.Module, list[Edit]] = field(default_factory=lambda: defaultdict(list))
    places: dict[object, str] = field(default_factory=dict)

    def name_site(self, node: Node, place: object, stem: str) -> str:
        """A free name in the module; the same for a place met twice."""
        if place not in self.places:
            taken = {*dict(node.module.named_children()), *(e.attribute for e in self.edits[node.module])}
            names = (f"_{stem}" if n == 1 else f"_{stem}_{n}" for n in range(1, len(taken) + 2))
            self.places[place] = next(name for name in names if name not in taken)
        return self.places[place]

    def add(self, node: Node, name: str, child: nn.Module) -> None:
        """Make `child` an attribute of the node's module.

        A container's forward may run all its children (DenseNet's blocks do), so there it is an attribute only, and
        the next module above that is no container has it as a child, under a longer name.
        """
        child.train(node.module.training)
        path, module = node.layer, node.module
        while isinstance(module, CONTAINERS):
            path = path.rpartition(".")[0]
            module = self.modules[path]
        if module is node.module:
            module.add_module(name, child)
            return
        vars(node.module)[name] = child
        inner = node.layer[len(path) :].strip(".").replace(".", "_")
        module.add_module(f"_{inner}{name}", child)


def insert(
    model: nn.Module,
    placement: Placement,
    input_desc: QuantDescriptor | None,
    weight_desc: QuantDescriptor | None,
    device: torch.device | None,
) -> None:
    """Convert layers, add quantizers to modules that call functions, and let the tensors' readers share them."""
    work = _Insertion(input_desc, weight_desc, device, dict(model.named_modules()))
    wanted = demands(placement)
    _convert_modules(placement, wanted, work)
    for node, decision in placement.decisions.items():
        if decision.quantize and node.functional and node.op in IN_CALLEE:
            _place_attention(node, work)
    for group in grouped(wanted, placement):
        _place_quantizer(group, work)
    for module, edits in work.edits.items():
        apply_edits(module, dict.fromkeys(edits))


def _convert_modules(placement: Placement, wanted: list[Demand], work: _Insertion) -> None:
    done: set[nn.Module] = set()
    for node in placement.graph.nodes:
        decision = placement.decisions.get(node)
        if node.functional or decision is None or not decision.quantize or node.module in done:
            continue
        done.add(node.module)
        if isinstance(node.module, nn.MultiheadAttention):
            joint = all(value is node.inputs[0] for value in node.inputs[:3])
            joint = joint and node.module.in_proj_weight is not None
            converted = QuantMultiheadAttention.convert_(node.module, work.input_desc, work.weight_desc, joint)
            for quantizer in converted._attention.quantizers() if decision.reason else ():
                quantizer.set_state(QuantizerState.PASSTHROUGH, decision.reason)
            for _, quantizer in named_quantizers(converted):
                _set_readers(quantizer, (node.label,))
        else:
            convert_layer(node.module, work.input_desc, work.weight_desc, work.device)
    for demand in wanted:
        pad = demand.holder.node
        if pad.op == "zero_pad" and not pad.functional and pad.module not in done:
            done.add(pad.module)
            PADDING[type(pad.module)].convert_(pad.module, work.input_desc, None, work.device)


def _place_attention(node: Node, work: _Insertion) -> None:
    place = (node.module, node.location)
    if place in work.places:
        return
    name = work.name_site(node, place, "attention")
    work.edits[node.module].append(edit_for(node, "callee", 0, name))
    attention = QuantAttention(work.input_desc).to(work.device)
    for quantizer in attention.quantizers():
        _set_readers(quantizer, (node.label,))
    work.add(node, name, attention)


def _descriptor(demand: Demand, work: _Insertion) -> QuantDescriptor:
    if demand.weight:
        base = work.weight_desc or QUANT_DESC_8BIT_WEIGHT_PER_TENSOR
        per_channel = work.weight_desc is None or base.axis is not None
        return replace(base, axis=demand.axis if per_channel else None)
    base = work.input_desc or QUANT_DESC_8BIT_PER_TENSOR
    return softmax_descriptor(base) if demand.softmax else base


def _place_quantizer(group: list[Demand], work: _Insertion) -> None:
    """One quantizer at every place of the group."""
    first = group[0]
    converted = next((d.holder for d in group if d.holder.attribute), None)
    if converted is not None:
        quantizer: Any = getattr(converted.node.module, converted.attribute)
    else:
        quantizer = TensorQuantizer(_descriptor(first, work)).to(work.device)
    readers = [n for n in Counter(d.value for d in group if d.value.kind == "activation").values() if n > 1]
    quantizer.last_result = LastResult(min(readers)) if readers else None
    for demand in group:
        _place(quantizer, demand.holder, work)
    passes = {demand.passes for demand in group}
    if len(passes) == 1 and first.passes:
        quantizer.set_state(QuantizerState.PASSTHROUGH, first.passes)
    described = dict.fromkeys(d.value.describe() for d in group)
    quantizer._qat_tensors = (*described,)
    _set_readers(quantizer, (*dict.fromkeys(d.holder.node.label for d in group),))


def _set_readers(quantizer: Any, labels: tuple[str, ...]) -> None:
    quantizer._qat_readers = labels


def _place(quantizer: TensorQuantizer, holder: Holder, work: _Insertion) -> None:
    node = holder.node
    if holder.attribute:
        node.module._modules[holder.attribute] = quantizer
        return
    place = (node.module, node.location, holder.key) if node.by_run else holder.place
    known = place in work.places
    name = work.name_site(node, place, f"{_stem(node, holder)}_quantizer{'s' if node.by_run else ''}")
    if not known:
        what = "result" if holder.key == "result" else "operand"
        if holder.key == 0 and node.assigns:
            quantizer.last_result = None  # the result is changed in place, so no other reader may have it
        work.edits[node.module].append(edit_for(node, what, holder.key, name))
        work.add(node, name, QuantRuns() if node.by_run else quantizer)
    if node.by_run:
        getattr(node.module, name)[str(node.run)] = quantizer


def _stem(node: Node, holder: Holder) -> str:
    if holder.key == "result":
        return node.op if node.op == "concat" else f"{node.op}_result"
    number = node.keys.index(holder.key)
    if node.op in ("conv", "conv_transpose", "linear"):
        return ("input", "weight")[number]
    return _SITE_NAMES.get((node.op, number), node.op)
