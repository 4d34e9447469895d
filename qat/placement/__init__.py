"""Where quantizers go: trace a model once, apply one table of rules, insert the quantizers in place, fold BatchNorm."""

from qat.placement.decisions import QUANTIZE, Decision, Placement, leave_float
from qat.placement.folding import fold_batch_norm_
from qat.placement.graph import Graph, Node, Value
from qat.placement.prepare import prepare
from qat.placement.rules import DEFAULT_RULES, Rule, float_if, replaced, without

__all__ = [
    "DEFAULT_RULES",
    "QUANTIZE",
    "Decision",
    "Graph",
    "Node",
    "Placement",
    "Rule",
    "Value",
    "float_if",
    "fold_batch_norm_",
    "leave_float",
    "prepare",
    "replaced",
    "without",
]
