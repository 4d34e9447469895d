"""Where quantizers go: one table, read from top to bottom; the first rule with an opinion on an operation decides.

A rule says which operations it is for and returns a Decision, or None to leave it to the rules below. To add one, put
it in front; to change one, replace it by name:

    stem = Rule("stem in INT8", QUANTIZE, layers="stem.*")
    qat.prepare(model, x, rules=(stem, *DEFAULT_RULES))
    qat.prepare(model, x, rules=without(DEFAULT_RULES, "small channels"))

Sources: NVIDIA, "Working with Quantized Types" (TensorRT documentation, explicit quantization and Q/DQ placement), and
what `tensorrt-rtx` 1.7 was seen to build.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qat.errors import ConfigError
from qat.placement import conditions as when
from qat.placement.decisions import QUANTIZE, Decision, Placement, leave_float
from qat.placement.graph import Node
from qat.selectors import Selector, as_selectors, match_selector

Judge = Callable[[Node, Placement], Decision | None]
"""A function of (operation, placement so far): what to do, or None for no opinion."""


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
        name: unique; a rule is replaced or removed by it.
        then: what to do, or a function of (operation, placement so far) that says so, or None for no opinion.
        ops: canonical operation names ("conv", "add", ...); empty means any.
        layers: name globs, module classes or predicates; a functional operation has its module, and both its
            module's name and its own ("layer1.0" and "layer1.0.add"). Empty means any.
    """

    name: str
    then: Decision | Judge
    ops: tuple[str, ...] = ()
    layers: Selector | tuple[Selector, ...] = ()

    def decide(self, node: Node, placement: Placement) -> Decision | None:
        """This rule's opinion on an operation."""
        if self.ops and node.op not in self.ops:
            return None
        chosen = as_selectors(self.layers)
        names = dict.fromkeys((node.layer, node.label))
        if chosen and not any(match_selector(chosen, name, node.module) for name in names):
            return None
        return self.then if isinstance(self.then, Decision) else self.then(node, placement)


def float_if(condition: Callable[[Node, Placement], bool], reason: str) -> Judge:
    """Judge that leaves an operation float where the condition holds, and has no opinion elsewhere."""
    decision = leave_float(reason)
    return lambda node, placement: decision if condition(node, placement) else None


CONVOLUTIONS = ("conv", "conv_transpose")
LAYERS = (*CONVOLUTIONS, "linear")

FLOAT_LOGITS = Rule(
    "logits",
    float_if(
        when.gives_logits, "it computes the network's logits, where rounding costs accuracy and INT8 saves little"
    ),
    LAYERS,
)
"""Leaves float the layers that give the logits; `qat.prepare` puts it in front unless `keep_float_logits` is False."""
DEFAULT_RULES: tuple[Rule, ...] = (
    Rule(
        "squeeze and excitation",
        float_if(
            when.is_gate, "it computes a gate from a 1x1 map (squeeze-and-excitation): too small to gain from INT8"
        ),
        LAYERS,
    ),
    Rule("1x1 map", float_if(when.reads_pooled_map, "it reads a pooled 1x1 map, too small for INT8"), CONVOLUTIONS),
    Rule(
        "grouped",
        float_if(when.is_grouped, "a grouped convolution that is not depthwise is slower in INT8 than in FP16"),
        CONVOLUTIONS,
    ),
    Rule(
        "small channels",
        float_if(when.has_few_channels, "a convolution under 16 channels is slower in INT8 than in FP16"),
        CONVOLUTIONS,
    ),
    Rule(
        "small matmul",
        float_if(when.is_small_matmul, "a matrix product with K or N under 16 is slower in INT8 than in FP16"),
        ("linear", "matmul"),
    ),
    Rule(
        "recurrent",
        leave_float("it runs one step after another; Rule('lstm', QUANTIZE, ('recurrent',)) in front changes that"),
        ("recurrent",),
    ),
    Rule("weighted layers", QUANTIZE, LAYERS),
    Rule("attention", when.attention_as_a_whole, ("matmul", "attention", "multihead_attention")),
    Rule("matrix product", QUANTIZE, ("matmul",)),
    Rule("einsum", leave_float("einsum has no INT8 form; write the product with torch.matmul"), ("einsum",)),
    Rule("residual add", when.residual_add, ("add",)),
    Rule("concat", when.concat, ("concat",)),
    Rule("average pooling", when.average_pooling, ("avg_pool",)),
    Rule(
        "global pooling",
        leave_float("global average pooling is kept float on both sides: one value per channel is left"),
        ("global_pool",),
    ),
    Rule(
        "product",
        float_if(
            when.is_gating, "an elementwise product in INT8 needs scales on both sides; SiLU and gates stay whole"
        ),
        ("mul",),
    ),
)
"""Every operation that no rule here speaks of (BatchNorm, ReLU, shapes, biases) is left alone: TensorRT fuses it, or
moves the scale across it."""


def without(rules: Iterable[Rule], *names: str) -> tuple[Rule, ...]:
    """The rules less those named.

    Raises:
        ConfigError: there is no rule of that name.
    """
    kept = list(rules)
    for name in names:
        kept.remove(_named(kept, name))
    return tuple(kept)


def replaced(rules: Iterable[Rule], *changed: Rule) -> tuple[Rule, ...]:
    """The rules with each changed one in the place of the one of its name.

    Raises:
        ConfigError: there is no rule of that name.
    """
    kept = list(rules)
    for rule in changed:
        kept[kept.index(_named(kept, rule.name))] = rule
    return tuple(kept)


def _named(rules: list[Rule], name: str) -> Rule:
    for rule in rules:
        if rule.name == name:
            return rule
    names = [rule.name for rule in rules]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
    raise ConfigError(f"no rule is named {name!r}. {hint}")


__all__ = [
    "DEFAULT_RULES",
    "FLOAT_LOGITS",
    "QUANTIZE",
    "Decision",
    "Judge",
    "Rule",
    "float_if",
    "leave_float",
    "replaced",
    "without",
]
