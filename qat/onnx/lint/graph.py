"""Questions that rules ask about an ONNX graph: what is quantized, by which node, with which scale."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
ALIASES = frozenset({"Cast", "Identity", "Dropout"})
MOVES = (
    ALIASES
    | {"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Expand", "Tile"}
    | {
        "MaxPool",
        "Gather",
        "Pad",
        "DepthToSpace",
        "SpaceToDepth",
    }
)
_QDQ_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})


def is_quantize(node: Any) -> bool:
    """QuantizeLinear, of ONNX or of ONNX Runtime's domain, which NVIDIA's parser reads as well."""
    return node is not None and node.op_type == "QuantizeLinear" and node.domain in _QDQ_DOMAINS


def is_dequantize(node: Any) -> bool:
    """DequantizeLinear, of ONNX or of ONNX Runtime's domain."""
    return node is not None and node.op_type == "DequantizeLinear" and node.domain in _QDQ_DOMAINS


def is_qdq(node: Any) -> bool:
    """One of the two."""
    return is_quantize(node) or is_dequantize(node)


def operand(node: Any, index: int) -> Any:
    """Input of a node, None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def constant(value: Any) -> NDArray[Any] | None:
    """The array of an initializer; None for anything else."""
    if value is None or value.const_value is None:
        return None
    return np.asarray(value.const_value.numpy())


def integer(node: Any, name: str, default: int) -> int:
    """An integer attribute."""
    return int(node.attributes[name].as_int()) if name in node.attributes else default


def dims(value: Any) -> tuple[int | None, ...] | None:
    """Shape with None for what is dynamic; None for an unknown rank."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def node_name(node: Any) -> str:
    """The node's name, or the one that TensorRT's parser gives a node without."""
    return str(node.name) if node.name else f"node_of_{node.outputs[0].name}"


def behind(value: Any, passing: frozenset[str]) -> Any:
    """Walk back through nodes of the types named, along their first input; the value reached."""
    producer = value.producer()
    while producer is not None and producer.op_type in passing and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def unquantized(value: Any) -> Any:
    """The value in front of any casts and quantizers."""
    return behind(value, ALIASES | {"QuantizeLinear", "DequantizeLinear"})


class LintGraph:
    """An onnx_ir model, with look-ups that are computed once.

    Args:
        model: with shapes inferred, see `qat.onnx.modelfile.read_ir`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._constant: dict[Any, bool] = {}
        self._quantizers: dict[Any, tuple[Any, ...]] = {}

    @cached_property
    def nodes(self) -> list[Any]:
        """All nodes in the file's order, those of subgraphs included."""
        from onnxscript import ir

        return list(ir.traversal.RecursiveGraphIterator(self.model.graph))

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        imports = self.model.opset_imports
        return int(imports.get("", imports.get("ai.onnx", 1)))

    @property
    def weighted(self) -> Iterator[Any]:
        """Convolutions and matrix products."""
        return (node for node in self.nodes if node.op_type in WEIGHTED)

    @cached_property
    def int8_layers(self) -> set[Any]:
        """Weighted nodes with quantized operands."""
        return {node for node in self.weighted if self.is_int8(node)}

    def is_constant(self, value: Any) -> bool:
        """Whether the value depends on no graph input."""
        if value is None:
            return True
        pending = [value]
        while pending:
            current = pending[-1]
            producer = current.producer()
            if current in self._constant:
                pending.pop()
            elif producer is None:
                self._constant[current] = current.const_value is not None
            else:
                inputs = [item for item in producer.inputs if item is not None]
                missing = [item for item in inputs if item not in self._constant]
                pending += missing
                if not missing:
                    random = producer.op_type.startswith("Random")
                    self._constant[current] = not random and all(self._constant[item] for item in inputs)
        return self._constant[value]

    def dequantizes(self, value: Any) -> tuple[Any, ...]:
        """The DequantizeLinear nodes that a value comes from by moves and concatenations only.

        Empty where any part of it is float.
        """
        if value not in self._quantizers:
            reached = behind(value, MOVES)
            producer = reached.producer()
            found: tuple[Any, ...] = ()
            if is_dequantize(producer):
                found = (producer,)
            elif producer is not None and producer.op_type == "Concat":
                parts = [self.dequantizes(part) for part in producer.inputs]
                found = tuple(node for part in parts for node in part) if all(parts) else ()
            self._quantizers[value] = found
        return self._quantizers[value]

    def is_int8(self, node: Any) -> bool:
        """Whether a weighted node has quantized operands, as an INT8 kernel needs."""
        return all(self.dequantizes(value) for value in node.inputs[:2])

    def is_context(self, dequantize: Any) -> bool:
        """Whether it dequantizes an attention's result, whose kernel wants that in INT8 whatever reads it."""
        quantize = dequantize.inputs[0].producer()
        product = behind(quantize.inputs[0], MOVES).producer() if is_quantize(quantize) else None
        if product is None or product.op_type != "MatMul":
            return False
        sources = (behind(value, MOVES | {"QuantizeLinear", "DequantizeLinear"}).producer() for value in product.inputs)
        return any(source is not None and source.op_type == "Softmax" for source in sources)

    def weight(self, node: Any) -> tuple[Any, NDArray[Any] | None]:
        """The constant second operand of a weighted node: DequantizeLinear or None, and the stored array or None.

        The array is as it is stored: where the file transposes it, before that. (None, None) without such an operand.
        """
        value = operand(node, 1)
        if value is None or not self.is_constant(value):
            return None, None
        found = self.dequantizes(value)
        return (found[0] if found else None), constant(behind(unquantized(value), MOVES))

    def readers(self, value: Any, passing: frozenset[str]) -> Iterator[Any]:
        """Nodes that read a value, directly or through nodes of the types named."""
        for node, _ in value.uses():
            if node.op_type in passing:
                for output in node.outputs:
                    yield from self.readers(output, passing)
            else:
                yield node


def scale_of(node: Any) -> NDArray[Any] | None:
    """Scale of a quantizer; None where it is not stored."""
    return constant(operand(node, 1))


def site(node: Any) -> str:
    """Name of the quantizer that a Q/DQ node belongs to: the node's name without its operator."""
    return re.sub(r"[/_.]?(De)?[Qq]uantizeLinear(_\d+)?$", "", node_name(node)) or node_name(node)
