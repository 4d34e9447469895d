"""Readable names and nothing that differs between two exports of one model."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_QUANTIZER = "TensorQuantizer"


def _module_path(node: Any) -> str:
    """Module path in which torch recorded the operation, or `model` for the outermost one.

    Torch sometimes records the reshape or transposition in front of a quantizer in the quantizer's own scope; such
    a node belongs to the module around it, since `<quantizer>/<operator>` names what quantizes.
    """
    scopes, classes = (_listed(node, key) for key in (_SCOPES, _CLASSES))
    inside = {index for index, kind in enumerate(classes) if str(kind).endswith(_QUANTIZER)}
    paths = [scope for index, scope in enumerate(scopes[:-1]) if index not in inside]
    path = str(paths[-1]) if paths else ""
    return path or "model"


def _listed(node: Any, key: str) -> list[Any]:
    try:
        return list(ast.literal_eval(node.metadata_props.get(key, "[]")))
    except (SyntaxError, ValueError):
        return []


def _unique(name: str, taken: set[str]) -> str:
    unique, count = name, 0
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    taken.add(unique)
    return unique


def name_nodes(model: Any) -> None:
    """Name nodes `<module path>/<operator>` and their outputs after them; Q/DQ nodes keep their site's names.

    What torch recorded for debugging (stack traces with this machine's paths) is dropped.
    """
    from onnxscript import ir

    graph = model.graph
    fixed = {*graph.inputs, *graph.outputs}
    taken = {value.name for value in [*fixed, *graph.initializers.values()]}
    names: set[str] = set()
    node: Any
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if _SCOPES in node.metadata_props or "/" not in (node.name or ""):
            node.name = f"{_module_path(node)}/{node.op_type}"
        node.name = _unique(node.name, names)
        node.metadata_props.clear()
        node.doc_string = None
        for index, value in enumerate(node.outputs):
            value.metadata_props.clear()
            if value not in fixed and value.name:
                value.name = _unique(f"{node.name}_output" + (f"_{index}" if index else ""), taken)
    for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]:
        value.metadata_props.clear()
    graph.metadata_props.clear()
    graph.doc_string = None
    model.metadata_props.clear()


def name_outputs(model: Any, names: Sequence[str] | None) -> None:
    """Name the graph's outputs; without names `output`, or `output_0` and on for several."""
    outputs = model.graph.outputs
    if names is None:
        names = ["output"] if len(outputs) == 1 else [f"output_{index}" for index in range(len(outputs))]
    for value, name in zip(outputs, names, strict=True):
        value.name = name


def describe(model: Any, facts: Mapping[str, str], version: str) -> None:
    """Producer and metadata of the file; no date, so that the same model gives the same bytes."""
    model.producer_name = "qat"
    model.producer_version = version
    model.doc_string = None
    model.graph.name = "model"
    model.metadata_props.update(facts)
