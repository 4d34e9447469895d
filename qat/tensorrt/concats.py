"""Concatenations in an engine: whether a branch that was INT8 already is quantized again for its concatenation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qat.tensorrt.layers import Layer
from qat.tensorrt.onnx_graph import OnnxGraph, node_name

_PASSES = ("Cast", "MaxPool", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze")
"""What may stand between a branch and a quantizer of its own, or between a concatenation and its quantizer."""


@dataclass(frozen=True)
class Concatenation:
    """One quantized concatenation of activations.

    Attributes:
        node: in the file.
        branches: how many tensors are joined.
        already_int8: how many of them another quantizer reads as well, so that their INT8 values exist.
        rounds: how often the engine rounds to INT8 for it, in the profile that does so most; None where the engine's
            layers do not tell, as only TensorRT for RTX names the steps of its kernels.
    """

    node: str
    branches: int
    already_int8: int
    rounds: int | None

    @property
    def requantized(self) -> int | None:
        """Branches that were INT8 already and are quantized once more; 0 where all share one scale."""
        return None if self.rounds is None else max(self.rounds - (self.branches - self.already_int8), 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "node": self.node,
            "branches": self.branches,
            "already_int8": self.already_int8,
            "rounds": self.rounds,
            "requantized": self.requantized,
        }


def concatenations(layers: Sequence[Layer], graph: OnnxGraph) -> tuple[Concatenation, ...]:
    """The quantized concatenations of activations, in the file's order; those of shapes and of floats are left out.

    Args:
        layers: of the engine.
        graph: of the file that it was built from.
    """
    found = []
    for node in (node for node in graph.nodes if node.op_type == "Concat"):
        own = graph.quantizers(node.output[0], _PASSES)
        if own:
            shared = sum(bool(graph.quantizers(_start(graph, tensor), _PASSES) - own) for tensor in node.input)
            names = own | {node_name(node)}
            found.append(Concatenation(node_name(node), len(node.input), shared, _rounds(layers, names)))
    return tuple(found)


def _start(graph: OnnxGraph, tensor: str) -> str:
    """The tensor that casts, and a quantizer of the branch itself, made this one from."""
    node = graph.producer(tensor)
    while node is not None and node.op_type in ("Cast", "QuantizeLinear", "DequantizeLinear"):
        tensor = node.input[0]
        node = graph.producer(tensor)
    return tensor


def _rounds(layers: Sequence[Layer], names: set[str]) -> int | None:
    if not any(layer.operations for layer in layers):
        return None
    counts: dict[int, int] = defaultdict(int)
    for layer in layers:
        if not names.isdisjoint(layer.onnx_nodes):
            if layer.operations[-1:] == ("Etc",):
                return None  # the name is cut short
            counts[layer.profile] += layer.operations.count("Roun")
    return max(counts.values(), default=0)
