"""Inspecting an engine: what runs in INT8, what does not and why, and what conversions it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qat.errors import EngineError
from qat.tensorrt.layers import Layer
from qat.tensorrt.onnx_graph import OnnxGraph, node_name, torch_module

_MOVES = frozenset({"Move", "Tran", "Cast", "Conc", "Repl", "Resh"})
_QUANTIZE_STEPS = _MOVES | {"Mul", "Div", "Min", "Max", "Roun"}
_DEQUANTIZE_STEPS = frozenset({"Cast", "Mul", "Move"})
_ARITHMETIC = frozenset({"Mul", "Div", "Min", "Max", "Clip", "Round", "LeakyRelu", "PRelu"})
_SHAPE_OPS = ("Concat", "Reshape", "Transpose", "Expand", "Tile", "Flatten", "Pad", "Slice", "Gather")
NOT_FOUND = "not found"


@dataclass(frozen=True)
class Operation:
    """One weighted ONNX node (or, without the ONNX file, one weighted layer) and how the engine runs it.

    `precision` is "int8" only if every profile runs it in INT8; `edge` and `cause` say what brings float in.
    """

    node: str
    op_type: str
    module: str
    precision: str
    layers: tuple[str, ...]
    edge: str = ""
    cause: str = ""


@dataclass(frozen=True)
class Inspection:
    """Layers of an engine, its weighted operations, and the layers that only convert."""

    layers: tuple[Layer, ...]
    operations: tuple[Operation, ...]
    reformats: tuple[Layer, ...]
    standalone_qdq: tuple[Layer, ...]

    @property
    def int8_coverage(self) -> float:
        """Percent of the weighted operations that run in INT8 in every profile; 0 where there is none."""
        return 100.0 * len(self.int8_operations) / len(self.operations) if self.operations else 0.0

    @property
    def int8_operations(self) -> tuple[Operation, ...]:
        """Operations in INT8."""
        return tuple(op for op in self.operations if op.precision == "int8")

    @property
    def float_operations(self) -> tuple[Operation, ...]:
        """All others, each with a cause if the ONNX file was given."""
        return tuple(op for op in self.operations if op.precision != "int8")

    def require_int8(self, percent: float) -> None:
        """Fail a build whose coverage is below `percent`.

        Raises:
            EngineError: names every operation that is not INT8, with the cause.
        """
        if self.int8_coverage + 1e-9 < percent:
            missing = "\n".join(f"- {describe(op)}" for op in self.float_operations) or "- no weighted operation at all"
            raise EngineError(
                f"INT8 coverage is {self.int8_coverage:.1f} % ({len(self.int8_operations)} of {len(self.operations)} "
                f"weighted operations); at least {percent:g} % is required. Not in INT8:\n{missing}"
            )

    def summary(self) -> dict[str, Any]:
        """Plain JSON values: coverage, counts and the operations that are not INT8."""
        return {
            "int8_coverage_percent": round(self.int8_coverage, 3),
            "int8_operations": len(self.int8_operations),
            "weighted_operations": len(self.operations),
            "layers": len(self.layers),
            "reformats": [layer.name for layer in self.reformats],
            "standalone_qdq": [layer.name for layer in self.standalone_qdq],
            "not_int8": [asdict(op) for op in self.float_operations],
        }


def describe(op: Operation) -> str:
    """One line: node, operator, module, precision and cause."""
    module = f", module {op.module}" if op.module else ""
    cause = f": {op.cause}" if op.cause else ""
    return f"{op.node} ({op.op_type}{module}) is {op.precision}{cause}"


def speed_warning(int8_ms: float, fp16_ms: float, inspection: Inspection, most: int = 5) -> str:
    """A sentence where INT8 is not faster than FP16, with the layers to look at first; empty where it is."""
    if int8_ms < fp16_ms:
        return ""
    suspects = [describe(op) for op in inspection.float_operations[:most]]
    suspects += [f"standalone {layer.name}" for layer in inspection.standalone_qdq[: max(most - len(suspects), 0)]]
    suspects += [f"reformat {layer.name}" for layer in inspection.reformats[: max(most - len(suspects), 0)]]
    look = "; ".join(suspects) or "every operation is INT8: the layers are too small for INT8 to pay"
    return f"INT8 takes {int8_ms:.3f} ms and FP16 {fp16_ms:.3f} ms, so INT8 does not pay. Look at: {look}."


def inspect_layers(layers: Sequence[Layer], graph: OnnxGraph | None = None) -> Inspection:
    """Sort out an engine's layers.

    Args:
        layers: from `layers_from_inspector` or `layers_from_log`.
        graph: the ONNX file; with it operations are the file's weighted nodes, and float ones get a cause.

    Raises:
        EngineError: no layers at all.
    """
    if not layers:
        raise EngineError(
            "There are no layers to inspect. On a GPU the engine inspector lists them; without one only the "
            "build log of TensorRT for RTX does, and build_engine.py stores it in the manifest."
        )
    operations = _from_graph(layers, graph) if graph else _from_layers(layers)
    reformats = tuple(layer for layer in layers if is_reformat(layer, graph))
    standalone = tuple(layer for layer in layers if layer not in reformats and is_standalone_qdq(layer, graph))
    return Inspection(tuple(layers), tuple(operations), reformats, standalone)


def _from_layers(layers: Iterable[Layer]) -> list[Operation]:
    return [
        Operation(layer.name, layer.kind, "", layer.precision, (layer.name,)) for layer in layers if layer.is_weighted
    ]


def _from_graph(layers: Sequence[Layer], graph: OnnxGraph) -> list[Operation]:
    profiles = sorted({layer.profile for layer in layers})
    index: dict[str, list[Layer]] = {}
    for layer in layers:
        for name in layer.onnx_nodes or (layer.name,):
            index.setdefault(name, []).append(layer)
    unnamed = [layer for layer in layers if layer.is_weighted and not layer.onnx_nodes]
    operations = []
    for node in graph.weighted_nodes:
        mentions = index.get(node_name(node), [])
        chosen = [layer for p in profiles for layer in _computing(mentions, unnamed, p)]
        precision = _combine([layer.precision for layer in chosen])
        cause, edge = "", ""
        if precision == NOT_FOUND:
            cause = "no layer of the engine names this node: it was folded into a constant, or removed."
        elif precision != "int8":
            found = graph.float_cause(node)
            cause, edge = found.reason, found.edge
        names = tuple(layer.name for layer in chosen)
        operations.append(Operation(node_name(node), node.op_type, torch_module(node), precision, names, edge, cause))
    return operations


def _computing(mentions: Sequence[Layer], unnamed: Sequence[Layer], profile: int) -> list[Layer]:
    """The layers of one profile that do a node's multiplications; a node is also named by the kernels around it.

    TensorRT for RTX drops the names of some convolutions that it runs as gemm. Such a node is computed by one of the
    `unnamed` weighted layers, and counts as INT8 only if all of those are.
    """
    own = [layer for layer in mentions if layer.profile == profile]
    weighted = [layer for layer in own if layer.is_weighted]
    if len(weighted) > 1:
        # A fused neighbour can name the node as well: the layer that carries its name is the one.
        named = [layer for layer in weighted if any(layer.name.startswith(n) for n in layer.onnx_nodes[:1])]
        weighted = named or weighted
    with_weight = [layer for layer in own if layer.weight is not None]
    return weighted or with_weight or [layer for layer in unnamed if layer.profile == profile] or own


def _combine(precisions: Sequence[str]) -> str:
    if not precisions:
        return NOT_FOUND
    others = [precision for precision in precisions if precision != "int8"]
    return others[0] if others else "int8"


def _op_types(layer: Layer, graph: OnnxGraph | None) -> list[str]:
    if graph is None:
        return list(layer.onnx_nodes)
    return [graph.by_name[name].op_type for name in layer.onnx_nodes if name in graph.by_name]


def is_reformat(layer: Layer, graph: OnnxGraph | None = None) -> bool:
    """True for a layer that only changes layout or type, and computes no shape operator of the file."""
    if "reformat" in layer.kind.lower():
        return True
    steps = set(layer.operations)
    computes = any(op in name for name in _op_types(layer, graph) for op in _SHAPE_OPS)
    return bool(steps) and steps <= _MOVES and not computes


def is_standalone_qdq(layer: Layer, graph: OnnxGraph | None = None) -> bool:
    """True for a layer that only quantizes or dequantizes: it was not fused into a neighbour."""
    kind = layer.kind.lower()
    steps = set(layer.operations)
    types = _op_types(layer, graph)
    if not _ARITHMETIC.isdisjoint(types):
        return False  # a product of the model's own, such as a gate, quantized in the kernel that computes it
    if kind in ("quantize", "dequantize") or ("Roun" in steps and steps <= _QUANTIZE_STEPS):
        return True
    if {"Cast", "Mul"} <= steps <= _DEQUANTIZE_STEPS and all(t.dtype == "int8" for t in layer.inputs):
        return True
    return (
        bool(types) and not layer.is_weighted and all("QuantizeLinear" in t or "DequantizeLinear" in t for t in types)
    )
