"""`prepare`: quantizers where TensorRT wants them."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from qat.convert import close_fast_paths, convert_layer, quantize_
from qat.descriptor import QuantDescriptor
from qat.errors import ConfigError
from qat.nn import conversion_obstacle
from qat.placement.deciding import decide
from qat.placement.decisions import Placement
from qat.placement.graph import Graph
from qat.placement.insertion import insert
from qat.placement.rules import DEFAULT_RULES, FLOAT_LOGITS, Rule
from qat.placement.tracing import call_arguments, run_once, trace
from qat.quantizer import name_quantizers, named_quantizers
from qat.selectors import Selector, as_selectors, check_globs, match_selector

logger = logging.getLogger("qat")
Model = TypeVar("Model", bound=nn.Module)
UNREACHED = "the example inputs do not reach it in evaluation mode"


def prepare(
    model: Model,
    example_inputs: Any,
    *,
    rules: Sequence[Rule] = DEFAULT_RULES,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] = (),
    keep_float_logits: bool = True,
    input_desc: QuantDescriptor | None = None,
    weight_desc: QuantDescriptor | None = None,
) -> Model:
    """Put quantizers where TensorRT wants them, in place, and return the model.

    The model is run once on the example inputs to see which tensor goes where. Then layers are converted as by
    `qat.quantize_`, and a module whose own code adds, joins or multiplies tensors gets quantizers inside its forward.
    It stays the model it was: names, parameters, state-dict keys, training mode and control flow are its own, and
    with every quantizer passing through its outputs are the same bit for bit. Where a tensor has several readers,
    one quantizer object serves them all. `qat.summary(model)` shows it.

    Args:
        model: float model; changed in place.
        example_inputs: a tensor, a sequence of positional arguments, or a mapping of keyword arguments, on the
            model's device, with sizes as in use: rules look at channels and sequence lengths.
        rules: the table; see `qat.placement.rules`.
        include: which layers may be quantized, by name glob, class or predicate; None means all.
        exclude: which layers and functional operations ("layer1.0.add", or the module that computes it) stay float.
        keep_float_logits: leave the layer that computes the network's outputs float.
        input_desc: descriptor of activations, None for INT8 per tensor.
        weight_desc: descriptor of weights, None for INT8 per output channel.

    Returns:
        The same object.

    Raises:
        ConfigError: the model has quantizers already, does not run on the example inputs, or has nothing to quantize; a
            name glob matches nothing.
    """
    if any(True for _ in named_quantizers(model)):
        raise ConfigError("the model has quantizers already. Call qat.prepare on the float model, once.")
    close_fast_paths(model.modules())
    chosen = None if include is None else as_selectors(include)
    refused = as_selectors(exclude)
    try:
        graph = trace(model, example_inputs)
    except ConfigError:
        run_once(model, *call_arguments(example_inputs))
        return _without_trace(model, include, exclude, input_desc, weight_desc)
    _label(graph)
    names = [*(name for name, _ in model.named_modules()), *(node.label for node in graph.nodes)]
    check_globs(names, [*(chosen or ()), *refused], type(model).__name__)
    table = (FLOAT_LOGITS, *rules) if keep_float_logits else tuple(rules)
    placement = decide(graph, table, chosen, refused)
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), None)
    insert(model, placement, input_desc, weight_desc, device)
    notes = _place_untraced(model, graph, chosen, refused, (input_desc, weight_desc), device)
    _keep_reasons(model, placement)
    name_quantizers(model)
    if not any(True for _ in named_quantizers(model)):
        reasons = Counter(d.reason for node, d in placement.decisions.items() if node.weighted)
        listed = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common(4)) or "there is none"
        raise ConfigError(
            f"no layer of {type(model).__name__} was quantized. Weighted operations left float: {listed}."
        )
    _set_notes(model, notes)
    return model


def _label(graph: Graph) -> None:
    """Number the functional operations of one kind in one module; an expression in a loop is one."""
    seen: dict[tuple[nn.Module, str], list[object]] = defaultdict(list)
    for node in graph.nodes:
        if node.functional:
            places = seen[node.module, node.op]
            place = node.location or object()
            if place not in places:
                places.append(place)
            node.ordinal = places.index(place)


def _without_trace(
    model: Model,
    include: Selector | Iterable[Selector] | None,
    exclude: Selector | Iterable[Selector],
    input_desc: QuantDescriptor | None,
    weight_desc: QuantDescriptor | None,
) -> Model:
    quantize_(model, include=include, exclude=exclude, input_desc=input_desc, weight_desc=weight_desc)
    _set_notes(model, {"": "it cannot be traced, so every layer was converted by itself: residual adds, concats and "
                           "attention stay float, nothing shares a scale, no rule was applied"})  # fmt: skip
    return model


def _place_untraced(
    model: nn.Module,
    graph: Graph,
    include: Sequence[Selector] | None,
    exclude: Sequence[Selector],
    descriptors: tuple[QuantDescriptor | None, QuantDescriptor | None],
    device: torch.device | None,
) -> dict[str, str]:
    """Module-level placement under modules that take another path on other data; what was lost, by module."""
    notes = {name: f"{reason}, so nothing inside it is quantized" for name, reason in graph.opaque.items()}
    modules = dict(model.named_modules())
    read = {value.name for node in graph.nodes for value in node.inputs if value.kind == "parameter"}
    for name in graph.unreached:
        module = modules[name]
        parent = name.rpartition(".")[0]
        if isinstance(modules.get(parent), nn.MultiheadAttention) or f"{name}.weight" in read:
            continue
        branch = next((b for b in graph.branching if name.startswith(f"{b}." if b else "")), None)
        reason: str | None = UNREACHED
        if branch is not None:
            excluded = match_selector(exclude, name, module)
            reason = f"excluded by {excluded}" if excluded else conversion_obstacle(module)
            if include is not None and not match_selector(include, name, module):
                reason = "not selected"
        if reason:
            _set(module, reason)
            continue
        convert_layer(module, *descriptors, device)
        notes[branch or ""] = (
            "its code decides by values in tensors, and the example inputs took one path: layers on the others were "
            "converted by themselves, adds and concats there stay float and share no scale"
        )
    return notes


def _set(module: nn.Module, reason: str) -> None:
    vars(module)["_qat_float_reason"] = reason


def _keep_reasons(model: nn.Module, placement: Placement) -> None:
    for node, decision in placement.decisions.items():
        reason = "" if decision.quantize else decision.reason
        if not node.functional:
            _set(node.module, reason)
        elif reason:
            reasons = vars(node.module).setdefault("_qat_float_operations", {})
            reasons[node.label.removeprefix(node.layer).lstrip(".")] = reason


def _set_notes(model: nn.Module, notes: dict[str, str]) -> None:
    vars(model)["_qat_notes"] = notes
    for name, note in notes.items():
        logger.warning("placement: %s: %s", name or type(model).__name__, note)
