"""Running the rules over a graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from qat.nn import conversion_obstacle
from qat.placement.attention import multihead_obstacle
from qat.placement.conditions import softmax_behind
from qat.placement.decisions import Decision, Placement, leave_float
from qat.placement.graph import Graph, Key, Node
from qat.placement.rewriting import edit_obstacle
from qat.placement.rules import Rule
from qat.placement.source import Edit
from qat.selectors import Selector, match_selector

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules whose own children may be run one by one, whatever they are."""
IN_CALLEE = ("attention",)
"""Functional operations replaced as a whole, because a tensor inside them is quantized too."""


def decide(
    graph: Graph, rules: Sequence[Rule], include: Sequence[Selector] | None, exclude: Sequence[Selector]
) -> Placement:
    """Decide every operation.

    Args:
        graph: the traced model.
        rules: first opinion wins.
        include: which weighted operations may be quantized, None for all.
        exclude: which operations stay float whatever the rules say.
    """
    placement = Placement(graph)
    weighted = [node for node in graph.nodes if node.weighted]
    for node in weighted:
        _decide(node, placement, rules, include, exclude)
    _agree(weighted, placement)
    others = [node for node in reversed(graph.nodes) if not node.weighted]
    for node in others:
        _decide(node, placement, rules, None, exclude)
    _agree(others, placement)
    _quantize_contexts(weighted, placement)
    return placement


def _decide(
    node: Node,
    placement: Placement,
    rules: Sequence[Rule],
    include: Sequence[Selector] | None,
    exclude: Sequence[Selector],
) -> None:
    if node in placement.decisions or not any(value.is_activation for value in node.inputs):
        return
    decision = next((d for rule in rules if (d := rule.decide(node, placement)) is not None), None)
    if decision is None:
        return
    group = decision.peers or ((node, decision),)
    reasons = [_refusal(member, part, include, exclude) for member, part in group]
    refusal = next((reason for reason in reasons if reason), "")
    for member, part in group:
        placement.decisions[member] = leave_float(refusal) if refusal else replace(part, peers=())


def _refusal(node: Node, decision: Decision, include: Sequence[Selector] | None, exclude: Sequence[Selector]) -> str:
    """Why an operation that the rules have spoken on stays float all the same."""
    names = dict.fromkeys((node.layer, node.label))
    matched = next((m for name in names if (m := match_selector(exclude, name, node.module))), None)
    if matched:
        return f"excluded by {matched}"
    if not decision.quantize:
        return decision.reason
    if include is not None and not any(match_selector(include, name, node.module) for name in names):
        return "not selected"
    return (_functional_obstacle(node, decision) if node.functional else _module_obstacle(node.module)) or ""


def _module_obstacle(module: nn.Module) -> str | None:
    return multihead_obstacle(module) if isinstance(module, nn.MultiheadAttention) else conversion_obstacle(module)


def edit_for(node: Node, what: str, key: Key, attribute: str) -> Edit:
    """The edit that puts a submodule at an operand or at the result of a functional operation."""
    assert node.location is not None
    return Edit(node.location, node.function, node.method, what, key, attribute, node.by_run)  # type: ignore[arg-type]


def _functional_obstacle(node: Node, decision: Decision) -> str | None:
    if node.op in ("conv", "conv_transpose", "linear") and node.inputs[1].is_activation:
        return "its weight is computed from the input"
    operands = operands_of(node, decision)
    if not operands and not decision.result:
        return None
    if node.location is None:
        return node.obstacle
    if isinstance(node.module, CONTAINERS) and not node.layer:
        return "it is called in a container that is the whole model, which has no place for a quantizer"
    if node.seen_elsewhere and 0 in operands:
        line = node.location.span[0]
        return f"line {line} changes that tensor in place, and the change is read under another name as well"
    if decision.result:
        edits = [edit_for(node, "result", 0, "q")]
    elif node.op in IN_CALLEE:
        edits = [edit_for(node, "callee", 0, "q")]
    else:
        edits = [edit_for(node, "operand", node.keys[n], "q") for n in operands]
    return next((reason for edit in edits if (reason := edit_obstacle(node.module, edit))), None)


def operands_of(node: Node, decision: Decision) -> tuple[int, ...]:
    """Numbers of the operands that a decision quantizes; of a weighted functional operation never the bias."""
    if decision.operands is not None:
        return decision.operands
    count = 2 if node.weighted else len(node.inputs)
    return tuple(n for n, value in enumerate(node.inputs[:count]) if value.floating)


def _quantize_contexts(nodes: Iterable[Node], placement: Placement) -> None:
    """Give the result of an INT8 attention a scale of its own where no INT8 layer reads it."""
    for node in nodes:
        decision = placement.decisions.get(node)
        if decision is None or not (decision.quantize and decision.private and node.functional):
            continue
        is_context = node.op == "attention" or softmax_behind(node) is not None
        if is_context and not placement.read_in_int8(node.outputs[0]):
            whole = replace(decision, result=True)
            if not _functional_obstacle(node, whole):
                placement.decisions[node] = whole


def _agree(nodes: Iterable[Node], placement: Placement) -> None:
    """One module, or one expression, has one decision for all its calls.

    Where they do not agree, the runs of an expression in a loop are told apart; what else is called twice stays float.
    """
    groups: dict[object, list[Node]] = defaultdict(list)
    for node in nodes:
        if node in placement.decisions or node.location is not None:
            groups[(node.module, node.location)].append(node)
    for group in groups.values():
        if _refused(group, placement) and _in_a_loop(group, placement):
            runs: dict[int, list[Node]] = defaultdict(list)
            for node in group:
                node.by_run = True
                runs[node.run].append(node)
        else:
            runs = {0: group}
        for same in runs.values():
            refused = _refused(same, placement)
            if refused is not None:
                placement.decisions.update(dict.fromkeys(same, refused))


def _refused(group: Sequence[Node], placement: Placement) -> Decision | None:
    """The decision that leaves all of them float, where one of them is or they differ."""
    decisions = [placement.decisions.get(node) for node in group]
    refused = next((d for d in decisions if d is not None and not d.quantize), None)
    if refused is None and len({(d.operands, d.result) if d is not None else None for d in decisions}) > 1:
        refused = leave_float("its calls on different tensors would be quantized differently")
    return refused


def _in_a_loop(group: Sequence[Node], placement: Placement) -> bool:
    """Whether they are runs of one expression in a module's forward, and some of them are to be quantized."""
    here = group[0].location
    if group[0].weighted or here is None or here.inside is not None or here.scope != "forward":
        return False
    decisions = [placement.decisions.get(node) for node in group]
    return len({node.run for node in group}) > 1 and any(d is not None and d.quantize for d in decisions)
