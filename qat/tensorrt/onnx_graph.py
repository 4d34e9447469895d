"""The ONNX side of an inspection: weighted nodes, their torch modules, and why one runs in float."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.tensorrt.parse import load_onnx_graph

WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "Attention")
_PASSES_SCALE = ("Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "MaxPool")
_SMALL_CHANNELS = 16


@dataclass(frozen=True)
class FloatCause:
    """Why a weighted node does not run in INT8: the tensor (edge) that brings float in, and a sentence."""

    edge: str
    reason: str


class OnnxGraph:
    """Look-ups in one ONNX graph; nodes of subgraphs are not listed."""

    def __init__(self, model: Any) -> None:
        from onnx import TensorProto

        graph = model.graph
        self.nodes = list(graph.node)
        self.by_name = {node_name(node): node for node in self.nodes}
        self.inputs = [value.name for value in graph.input]
        self._readers: dict[str, list[Any]] = defaultdict(list)
        for node in self.nodes:
            for tensor in node.input:
                self._readers[tensor].append(node)
        self._producer = {output: node for node in self.nodes for output in node.output if output}
        self._shapes = {item.name: tuple(item.dims) for item in graph.initializer}
        self._constants = set(self._shapes)
        for node in self.nodes:  # in topological order
            if all(tensor in self._constants for tensor in node.input if tensor):
                self._constants.update(node.output)
        self._is_int8 = {item.name for item in graph.initializer if item.data_type == TensorProto.INT8}

    @staticmethod
    def load(path: str | Path) -> OnnxGraph:
        """Read the file without its weights' external data.

        Raises:
            EngineError: missing, empty or not ONNX.
        """
        return OnnxGraph(load_onnx_graph(path))

    @property
    def weighted_nodes(self) -> list[Any]:
        """Nodes whose work INT8 speeds up, in the file's order."""
        return [node for node in self.nodes if node.op_type in WEIGHTED_OPS]

    @property
    def quantized_nodes(self) -> set[str]:
        """Names of the weighted nodes that carry Q/DQ."""
        return {node_name(node) for node in self.weighted_nodes if self.carries_qdq(node)}

    def readers(self, tensor: str) -> list[Any]:
        """The nodes that read a tensor, in the file's order; one that reads it twice is there twice."""
        return self._readers.get(tensor, [])

    def quantizers(self, tensor: str, passes: Collection[str]) -> set[str]:
        """Names of the QuantizeLinear nodes that read a tensor, also behind operators of the types `passes`."""
        names: set[str] = set()
        for reader in self.readers(tensor):
            if reader.op_type == "QuantizeLinear":
                names.add(node_name(reader))
            elif reader.op_type in passes:
                names |= self.quantizers(reader.output[0], passes)
        return names

    def producer(self, tensor: str) -> Any | None:
        """The node that computes a tensor; None for inputs and initializers."""
        return self._producer.get(tensor)

    def is_constant(self, tensor: str) -> bool:
        """Whether a tensor depends on no graph input."""
        return tensor in self._constants

    def carries_qdq(self, node: Any) -> bool:
        """Whether one of a weighted node's two operands comes from a DequantizeLinear, casts and shapes between."""
        return any(self._dequantize(tensor, _PASSES_SCALE) is not None for tensor in node.input[:2])

    def float_cause(self, node: Any) -> FloatCause:
        """Explain why a node that TensorRT runs in float is not INT8, starting from its activation and weight."""
        operands = list(node.input[:2])
        for index, tensor in enumerate(operands):
            dequantize = self._dequantize(tensor)
            if dequantize is None:
                return FloatCause(tensor, self._unquantized(node, index, tensor))
            wrong = self._wrong_scales(node, index, dequantize)
            if wrong:
                return FloatCause(tensor, wrong)
        return FloatCause(operands[0] if operands else "", self._slow_shape(node))

    def _dequantize(self, tensor: str, through: tuple[str, ...] = ("Cast",)) -> Any | None:
        node = self._producer.get(tensor)
        while node is not None and node.op_type in through:
            node = self._producer.get(node.input[0])
        return node if node is not None and node.op_type == "DequantizeLinear" else None

    def _unquantized(self, node: Any, index: int, tensor: str) -> str:
        producer = self._producer.get(tensor)
        if tensor in self._shapes:
            origin = "an initializer"
        elif producer is None:
            origin = "a graph input"
        else:
            origin = f"{producer.op_type} '{node_name(producer)}'"
        role = "weight" if index == 1 and (tensor in self._shapes or self.is_constant(tensor)) else "input"
        return f"{role} '{tensor}', from {origin}, has no QuantizeLinear/DequantizeLinear: quantize it."

    def _wrong_scales(self, node: Any, index: int, dequantize: Any) -> str:
        channels = self._shapes.get(dequantize.input[1], ())
        if max(channels, default=1) == 1:
            return ""
        axis = next((a.i for a in dequantize.attribute if a.name == "axis"), 1)
        tensor = dequantize.output[0]
        if index == 0:
            return f"input '{tensor}' has one scale a channel: activations need one scale a tensor."
        rank = len(self._shapes.get(dequantize.input[0], ()))
        axis = axis % rank if rank and axis < 0 else axis
        if node.op_type == "ConvTranspose":
            return f"weight '{tensor}' of a ConvTranspose has one scale a channel: use one scale a tensor."
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        wanted = {"Conv": 0, "Gemm": 0 if transposed else 1, "MatMul": max(rank - 1, 1)}.get(node.op_type)
        if wanted is not None and axis != wanted:
            return f"weight '{tensor}' has its scales along axis {axis}; {node.op_type} needs axis {wanted}."
        return ""

    def _slow_shape(self, node: Any) -> str:
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        dequantize = self._dequantize(node.input[1]) if len(node.input) > 1 else None
        shape = self._shapes.get(dequantize.input[0], ()) if dequantize is not None else ()
        if groups > 1 and shape and shape[1] > 1:
            return f"both operands are quantized, but a grouped convolution ({groups} groups) is faster in float."
        if shape and min(shape[:2]) < _SMALL_CHANNELS:
            return (
                f"both operands are quantized, but the weight of shape {shape} is small: with fewer than "
                f"{_SMALL_CHANNELS} channels (K or N of a MatMul) float is faster. Leave the layer float."
            )
        return (
            "both operands are quantized and TensorRT still chose a float kernel: the shapes (M or N of 1, for "
            "instance) have no INT8 kernel, or a type conversion separates the DequantizeLinear from the operator."
        )


def node_name(node: Any) -> str:
    """The node's name, or the one that TensorRT's parser gives a node without."""
    return str(node.name) or f"node_of_{node.output[0]}"


def torch_module(node: Any) -> str:
    """The torch module that a node comes from: dynamo exports record it, older ones put it into the name."""
    for prop in node.metadata_props:
        if prop.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = ast.literal_eval(prop.value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                break
            if isinstance(scopes, list):
                return str(scopes[-2]) if len(scopes) > 1 else ""
    parts = str(node.name).strip("/").split("/")
    return ".".join(parts[:-1])
