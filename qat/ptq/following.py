"""What stands alone behind a layer: its BatchNorm, and the functions up to the next tensor that others read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from qat.placement.folding import layer_in_front
from qat.placement.graph import Graph, Node
from qat.placement.tracing import trace

Function = Callable[[Tensor], Tensor]


def norms_behind(model: nn.Module, example_inputs: Any) -> dict[nn.Module, nn.Module]:
    """By layer the BatchNorm that alone reads its output; both are called once."""
    graph = trace(model, example_inputs)
    calls = _calls(graph)
    found = {layer_in_front(node): node.module for node in graph.nodes}
    return {layer: norm for layer, norm in found.items() if layer and calls[layer] == calls[norm] == 1}


def functions_behind(model: nn.Module, example_inputs: Any) -> dict[nn.Module, list[Function]]:
    """By layer the BatchNorm and activation that alone read its output, to be applied to it in order."""
    graph = trace(model, example_inputs)
    calls = _calls(graph)
    return {
        node.module: _functions(node, calls)
        for node in graph.nodes
        if not node.functional and len(node.outputs) == 1 and calls[node.module] == 1
    }


def _calls(graph: Graph) -> Counter[nn.Module]:
    return Counter(node.module for node in graph.nodes if not node.functional)


def _functions(layer: Node, calls: Counter[nn.Module]) -> list[Function]:
    found: list[Function] = []
    value = layer.outputs[0]
    while len(value.readers) == 1:
        node = value.readers[0][0]
        function = _function(node)
        if function is None or len(node.outputs) != 1 or (node.op == "batch_norm" and calls[node.module] != 1):
            break
        found.append(function)
        value = node.outputs[0]
    return found


def _function(node: Node) -> Function | None:
    if not node.functional:
        return node.module if node.op in ("batch_norm", "activation") else None
    plain = node.op == "activation" and not set(node.arguments) - {"inplace"}
    return getattr(F, node.function, None) if plain else None
