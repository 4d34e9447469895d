"""Where quantizers go: run a model once, apply one table of rules, insert the quantizers in place, fold BatchNorm.

graph, operators, tracing, callsite    what the model computes, and where in its code
rules, conditions, decisions, deciding what is quantized, and why the rest is not
demands, insertion                     which tensors share a quantizer, and where it is put
source, rewriting, attention, padding  how it gets into a forward

The trace decides and is then thrown away; the model that trains is the user's own. A torch.fx.GraphModule in its place
would have frozen `self.training` (functional dropout, auxiliary heads), lost classes, attributes and unused parameters,
and failed on control flow over shapes. So a layer is converted in place, and only an expression such as `out += x`
is changed, in a subclass made for that one instance from the source of its own forward. What has no source or no
such form stays float, and the summary says why.
"""

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
