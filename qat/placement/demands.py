"""From decisions to quantizers: which tensors are quantized where, and which of them share one quantizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from qat.placement.conditions import softmax_behind
from qat.placement.deciding import IN_CALLEE, edit_for, operands_of
from qat.placement.decisions import Placement
from qat.placement.graph import Key, Node, Value
from qat.placement.operators import PASS_SCALE
from qat.placement.padding import PADDING
from qat.placement.rewriting import edit_obstacle

BEFORE_PADDING = "its input is quantized in front of the padding, since TensorRT wants no Q/DQ between the two"


@dataclass(frozen=True)
class Holder:
    """A place in the model that holds a quantizer.

    Attributes:
        node: the operation that reads the tensor there (or returns it).
        key: which operand, or "result".
        attribute: name of the quantizer in the node's module; "" for one that is still to be named.
    """

    node: Node
    key: Key
    attribute: str = ""

    @property
    def place(self) -> object:
        """What holders have in common that are the same place: a module called twice, an expression in a loop."""
        run = self.node.run if self.node.by_run else None
        return (self.node.module, self.node.location if self.node.functional else None, self.key, run)


@dataclass(frozen=True)
class Demand:
    """A tensor that is to be quantized at a place.

    Attributes:
        value: the tensor.
        holder: the place.
        private: it shares its scale with nothing.
        softmax: it is a softmax, whose amax is fixed.
        weight: it is a parameter, or computed from parameters only.
        axis: dimension of a weight with one scale per index, None for one scale.
        passes: the quantizer stays at its place only to pass the tensor through, for this reason.
    """

    value: Value
    holder: Holder
    private: bool = False
    softmax: bool = False
    weight: bool = False
    axis: int | None = None
    passes: str = ""


def demands(placement: Placement) -> list[Demand]:
    """Every place where a quantizer is wanted, in the order of execution, moved in front of zero paddings."""
    found = [demand for node in placement.graph.nodes for demand in _of_node(node, placement)]
    return [moved for demand in found for moved in _before_padding(demand, found)]


def _of_node(node: Node, placement: Placement) -> Iterator[Demand]:
    decision = placement.decisions.get(node)
    if decision is None or not decision.quantize:
        return
    if decision.result:
        yield Demand(node.outputs[0], Holder(node, "result"))
    if node.functional and node.op in IN_CALLEE:
        return
    if not node.functional and node.op != "recurrent":
        names = ("_input_quantizer", "_key_input_quantizer", "_value_input_quantizer")
        count = len(names) if node.op == "multihead_attention" else 1
        for number, name in enumerate(names[:count]):
            yield Demand(node.inputs[number], Holder(node, number, name), decision.private)
    for number in operands_of(node, decision) if node.functional else ():
        value = node.inputs[number]
        weight = not value.is_activation
        softmax = decision.private and _is_softmax(node, number)
        axis = _weight_axis(node, number, value) if weight else None
        yield Demand(value, Holder(node, node.keys[number]), decision.private, softmax, weight, axis)


def _is_softmax(node: Node, number: int) -> bool:
    found = softmax_behind(node) if node.op == "matmul" else None
    return found is not None and found[1] == number


def _weight_axis(node: Node, number: int, value: Value) -> int | None:
    """Dimension with one scale per index: the output channels, where TensorRT runs that in INT8."""
    if node.op in ("conv", "linear"):
        return 0
    return 1 if node.op == "matmul" and number == 1 and len(value.shape) == 2 else None


def _before_padding(demand: Demand, every: list[Demand]) -> Iterator[Demand]:
    """The demand, or in the place of one behind a zero padding that nothing else reads, one in front of it as well."""
    pad = demand.value.producer
    if pad is None or pad.op != "zero_pad" or demand.holder.node.op not in ("conv", "conv_transpose"):
        yield demand
        return
    wanted = {(other.holder.node, other.holder.key) for other in every}
    alone = all((n, n.keys[i] if n.functional else i) in wanted for n, i in demand.value.readers)
    if not alone or not pad.inputs[0].is_activation or not _can_hold(pad):
        yield demand
        return
    if not demand.holder.node.functional:
        yield replace(demand, private=True, passes=BEFORE_PADDING)
    yield Demand(pad.inputs[0], Holder(pad, pad.keys[0], "" if pad.functional else "_input_quantizer"))


def _can_hold(pad: Node) -> bool:
    if not pad.functional:
        return type(pad.module) in PADDING
    return pad.location is not None and not edit_obstacle(pad.module, edit_for(pad, "operand", pad.keys[0], "q"))


class _Classes:
    """Union of values that one scale has to fit."""

    def __init__(self) -> None:
        self.parent: dict[Value, Value] = {}

    def find(self, value: Value) -> Value:
        while self.parent.get(value, value) is not value:
            value = self.parent[value]
        return value

    def join(self, values: Iterable[Value]) -> None:
        roots = [self.find(value) for value in values]
        for root in roots[1:]:
            if root is not self.find(roots[0]):
                self.parent[root] = self.find(roots[0])


def grouped(found: list[Demand], placement: Placement) -> list[list[Demand]]:
    """Demands by quantizer: those on one tensor, on tensors that a scale passes between, or at one place."""
    classes = _Classes()
    for node in placement.graph.nodes:
        decision = placement.decisions.get(node)
        joined = node.op != "concat" or (decision is not None and decision.quantize)
        if node.op in PASS_SCALE and joined:
            classes.join(v for v in (*node.inputs, *node.outputs) if v.is_activation)
    places: dict[object, list[Demand]] = defaultdict(list)
    for demand in found:
        places[demand.holder.place].append(demand)
    for same in places.values():
        classes.join(d.value for d in same if not d.private and not d.weight)
    groups: dict[object, list[Demand]] = {}
    for demand in found:
        alone = demand.private or demand.weight
        key = demand.holder.place if alone else classes.find(demand.value)
        groups.setdefault(key, []).append(demand)
    return list(groups.values())
