"""Opset 18, the oldest that torch's exporter writes, down to 13.

onnx.version_converter cannot do it: it has no adapter for BatchNormalization below 15 and leaves attributes
behind that the older operators do not have. Few operators changed between 13 and 18 in more than the element
types they take (ONNX operator change log); those are rewritten here, and anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from qat.errors import ExportError

_REDUCTIONS = {
    f"Reduce{kind}" for kind in ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
}
_SOURCE_OPSET = 18


class _Graph:
    """Initializers of the file, read and added to by the rewrites."""

    def __init__(self, proto: Any) -> None:
        self.graph = proto.graph
        self.constants = {tensor.name: tensor for tensor in proto.graph.initializer}

    def ints(self, name: str) -> list[int] | None:
        from onnx import numpy_helper

        tensor = self.constants.get(name)
        return None if tensor is None else [int(i) for i in numpy_helper.to_array(tensor).reshape(-1)]

    def add(self, name: str, array: Any) -> str:
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(array, name)
            self.graph.initializer.append(self.constants[name])
        return name


def _refuse(node: Any, opset: int, why: str) -> ExportError:
    return ExportError(
        f"node '{node.name}' ({node.op_type}) cannot be written in opset {opset}: {why}. "
        f"Use opset={_SOURCE_OPSET} or newer."
    )


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _drop(node: Any, name: str) -> None:
    for attribute in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(attribute)


def _reduction(node: Any, graph: _Graph, opset: int) -> Iterator[Any]:
    """Axes were an attribute before 18."""
    from onnx import helper

    if len(node.input) > 1 and node.input[1]:
        axes = graph.ints(node.input[1])
        if axes is None:
            raise _refuse(node, opset, "its axes are computed, and must be constants there")
        node.attribute.append(helper.make_attribute("axes", axes))
    elif _attributes(node).get("noop_with_empty_axes"):
        raise _refuse(node, opset, "it reduces no axis")
    del node.input[1:]
    yield node


def _shape(node: Any, graph: _Graph, opset: int) -> Iterator[Any]:
    """Shape had no start and end before 15: slice them out."""
    from onnx import helper

    found = _attributes(node)
    start, end = found.get("start", 0), found.get("end", np.iinfo(np.int64).max)
    del node.attribute[:]
    if (start, end) == (0, np.iinfo(np.int64).max):
        yield node
        return
    result, node.output[0] = node.output[0], f"{node.name}_whole"
    bounds = [graph.add(f"shape_bound_{value}", np.array([value], np.int64)) for value in (start, end)]
    yield node
    yield helper.make_node("Slice", [node.output[0], *bounds], [result], name=f"{node.name}/Slice")


def _reshape(node: Any, graph: _Graph, opset: int) -> Iterator[Any]:
    """allowzero came in 14: without it a 0 in the target means "as in the input"."""
    if _attributes(node).get("allowzero") and 0 in (graph.ints(node.input[1]) or []):
        raise _refuse(node, opset, "its target shape has a zero")
    _drop(node, "allowzero")
    yield node


def _split(node: Any, graph: _Graph, opset: int) -> Iterator[Any]:
    """num_outputs came in 18; without it, and without sizes, the split is into equal parts."""
    _drop(node, "num_outputs")
    yield node


def _hard_swish(node: Any, graph: _Graph, opset: int) -> Iterator[Any]:
    """HardSwish came in 14."""
    from onnx import helper

    gate = f"{node.name}_gate"
    yield helper.make_node(
        "HardSigmoid", [node.input[0]], [gate], name=f"{node.name}/HardSigmoid", alpha=1 / 6, beta=0.5
    )
    yield helper.make_node("Mul", [node.input[0], gate], list(node.output), name=f"{node.name}/Mul")


def _layer_norm(node: Any, graph: _Graph, opset: int) -> Iterator[Any]:
    """LayerNormalization came in 17. The axes are the last -axis ones, as torch writes them."""
    from onnx import helper

    found = _attributes(node)
    axis = found.get("axis", -1)
    if axis >= 0 or len(node.output) > 1:
        raise _refuse(node, opset, "its axis counts from the front or it returns statistics")
    axes = list(range(axis, 0))
    epsilon = graph.add(f"{node.name}_epsilon", np.array(found.get("epsilon", 1e-5), np.float32))
    two = graph.add("layer_norm_two", np.array(2, np.float32))

    def step(op_type: str, inputs: list[str], output: str = "", **attributes: Any) -> Any:
        label = f"{node.name}/{op_type}_{len(steps)}"
        steps.append(helper.make_node(op_type, inputs, [output or label], name=label, **attributes))
        return output or label

    steps: list[Any] = []
    centred = step("Sub", [node.input[0], step("ReduceMean", [node.input[0]], axes=axes, keepdims=1)])
    variance = step("ReduceMean", [step("Pow", [centred, two])], axes=axes, keepdims=1)
    scaled = [step("Div", [centred, step("Sqrt", [step("Add", [variance, epsilon])])]), node.input[1]]
    if len(node.input) > 2 and node.input[2]:
        step("Add", [step("Mul", scaled), node.input[2]], node.output[0])
    else:
        step("Mul", scaled, node.output[0])
    yield from steps


_Rewrite = Callable[[Any, _Graph, int], Iterator[Any]]


def _rewrite(op_type: str, opset: int) -> _Rewrite | None:
    """The rewrite that an operator needs below `opset`, where it needs one."""
    changed: dict[str, tuple[int, _Rewrite | None]] = {
        **dict.fromkeys(_REDUCTIONS, (18, _reduction)),
        "Split": (18, _split),
        "LayerNormalization": (17, _layer_norm),
        "Shape": (15, _shape),
        "Reshape": (14, _reshape),
        "HardSwish": (14, _hard_swish),
    }
    since, rewrite = changed.get(op_type, (0, None))
    return rewrite if opset < since else None


def _check_node(node: Any, opset: int) -> None:
    """Drop attributes that the older operator lacks where they hold their default; refuse the others."""
    from onnx import defs, helper

    if node.domain:
        return
    try:
        older = defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError as error:
        raise _refuse(node, opset, "the operator does not exist there") from error
    newer = defs.get_schema(node.op_type, _SOURCE_OPSET, "")
    for name, value in _attributes(node).items():
        if name in older.attributes:
            continue
        default = newer.attributes[name].default_value
        if not default.name or helper.get_attribute_value(default) != value:
            raise _refuse(node, opset, f"it needs {name}={value}")
        _drop(node, name)
    if len(node.input) > older.max_input:
        raise _refuse(node, opset, f"it has {len(node.input)} inputs and there may be {older.max_input}")


def downgrade(proto: Any, opset: int) -> Any:
    """Rewrite a ModelProto of opset 18 for an older opset, 13 at least; in place.

    Args:
        proto: ModelProto.
        opset: the opset to reach.

    Returns:
        The same object.

    Raises:
        ExportError: an operator has no equivalent there; the message names the node.
    """
    from onnx import OperatorSetIdProto, helper

    graph, nodes = _Graph(proto), []
    for node in proto.graph.node:
        rewrite = _rewrite(node.op_type, opset)
        for made in [node] if rewrite is None else rewrite(node, graph, opset):
            _check_node(made, opset)
            nodes.append(made)
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(copies)
    for entry in proto.opset_import:
        if entry.domain in {"", "ai.onnx"}:
            entry.version = opset
    target = OperatorSetIdProto()
    target.version = opset
    proto.ir_version = helper.find_min_ir_version_for([target])
    used = {name for node in proto.graph.node for name in node.input} | {v.name for v in proto.graph.output}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in used]
    copies = [type(tensor).FromString(tensor.SerializeToString()) for tensor in kept]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(copies)
    return proto
