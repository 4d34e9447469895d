"""What a rule can decide, and what the rules have decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from qat.placement.graph import WEIGHTED_OPS, Graph, Node, Value
from qat.placement.operators import PASS_SCALE


@dataclass(frozen=True)
class Decision:
    """What happens to one operation.

    Attributes:
        quantize: run it in INT8.
        operands: numbers of the tensor operands to quantize; None for every floating-point one.
        result: quantize what it returns.
        private: its operands share a scale with nothing else (attention).
        peers: further operations decided with it: all of them or none.
        reason: why it stays float.
    """

    quantize: bool
    operands: tuple[int, ...] | None = None
    result: bool = False
    private: bool = False
    peers: tuple[tuple[Node, Decision], ...] = ()
    reason: str = ""


QUANTIZE = Decision(True)
"""Quantize the operation's inputs, its weight among them."""


def leave_float(reason: str) -> Decision:
    """Leave the operation float; the reason completes "it stays float because ..."."""
    return Decision(False, reason=reason)


@dataclass(eq=False)
class Placement:
    """The graph and the decisions made so far: weighted operations first, then the others from last to first."""

    graph: Graph
    decisions: dict[Node, Decision] = field(default_factory=dict)

    def quantizes(self, node: Node, operand: int) -> bool:
        """Whether this operation reads this operand in INT8."""
        decision = self.decisions.get(node)
        if decision is None or not decision.quantize or not node.inputs[operand].floating:
            return False
        return decision.operands is None or operand in decision.operands

    def read_in_int8(self, value: Value) -> bool:
        """Whether anything reads the tensor, as it is or through operations that pass a scale on, in INT8."""
        for node, operand in self.graph.readers(value, stop=_NOT_PASSING):
            if self.quantizes(node, operand):
                return True
            decision = self.decisions.get(node)
            if decision is not None and decision.result and node.op in PASS_SCALE:
                return True
        return False

    def read_only_in_int8(self, value: Value) -> bool:
        """Whether everything that reads the tensor, or what a scale passes to from it, does so in INT8."""
        readers = [(n, i) for n, i in self.graph.readers(value, stop=_NOT_PASSING) if n.op not in PASS_SCALE]
        return self.read_in_int8(value) and all(self.quantizes(node, operand) for node, operand in readers)

    def from_int8(self, value: Value) -> bool:
        """Whether a quantized weighted operation computes the tensor, up to activations, norms and sums."""
        stop = (*WEIGHTED_OPS, "concat")
        return any(self.quantizes(n, 0) for n in self.graph.producers(value, stop) if n.op in WEIGHTED_OPS)

    def layer_before(self, value: Value) -> Node | None:
        """The layer that computes the tensor, with at most a BatchNorm behind it, for a single reader."""
        node = value.producer
        while node is not None and node.op in ("batch_norm", "identity") and len(value.readers) == 1:
            value = node.inputs[0]
            node = value.producer
        if node is None or len(value.readers) != 1 or node.op not in ("conv", "conv_transpose", "linear"):
            return None
        return node

    def leads_to_int8(self, value: Value) -> bool:
        """Whether a quantized weighted operation reads what is computed from the tensor."""
        return any(self.quantizes(n, i) for n, i in self.graph.readers(value) if n.op in WEIGHTED_OPS)


class _NotPassing(tuple[str, ...]):
    """Every operation that does not pass a scale on."""

    def __contains__(self, op: object) -> bool:
        return op not in PASS_SCALE


_NOT_PASSING = _NotPassing()
