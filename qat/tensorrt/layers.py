"""Layers of a built engine, and reading them from the engine inspector's JSON (TensorRT 10 and 11)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from qat.errors import EngineError

WEIGHTED_KINDS = (
    "correlation",
    "gemm",
    "deconv",
    "convolution",
    "matrixmultiply",
    "mha",
    "attention",
    "fullyconnected",
)
WEIGHTED_STEPS = frozenset({"Corr", "Conv", "Deco", "Fc", "Gemm", "Matm"})

_ONNX_LAYER = re.compile(r"\[ONNX Layer: (.+?)\](?=[\x1e\x1f\s]*(?:\[ONNX Layer: |$))")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_MYELIN_SUFFIX = re.compile(r"_myl(\d+)_\d+$")
_TYPES = (
    ("int8", r"int8"),
    ("fp8", r"fp8|float8"),
    ("fp4", r"fp4|float4"),
    ("int4", r"int4"),
    ("bf16", r"bf16|bfloat16"),
    ("fp16", r"fp16|half|float16"),
    ("fp32", r"fp32|float"),
    ("int64", r"int64"),
    ("int32", r"int32"),
    ("bool", r"bool"),
)


@dataclass(frozen=True)
class LayerTensor:
    """A tensor as a layer reads or writes it: type such as "int8", and shape with -1 for dynamic."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One kernel of an engine. `onnx_nodes` are the file's nodes that it computes, wholly or in part."""

    name: str
    kind: str
    inputs: tuple[LayerTensor, ...] = ()
    constants: tuple[LayerTensor, ...] = ()
    outputs: tuple[LayerTensor, ...] = ()
    onnx_nodes: tuple[str, ...] = ()
    tactic: str = ""
    profile: int = 0

    @property
    def is_weighted(self) -> bool:
        """True for a kernel that multiplies matrices: convolution, deconvolution, gemm, attention, or a fusion."""
        kind = self.kind.lower()
        return any(word in kind for word in WEIGHTED_KINDS) or self._is_weighted_fusion

    @property
    def _is_weighted_fusion(self) -> bool:
        return "gemm" in self.tactic or bool(WEIGHTED_STEPS.intersection(self.operations))

    @property
    def weight(self) -> LayerTensor | None:
        """The largest constant with at least two dimensions over 1; biases, scales and lookups have fewer."""
        matrices = [c for c in self.constants if sum(size > 1 for size in c.shape) > 1]
        return max(matrices, key=lambda c: math.prod(c.shape), default=None)

    @property
    def precision(self) -> str:
        """Type the kernel computes in.

        A weighted kernel is "int8" if its weight is INT8 and its activation arrives in INT8, or is quantized inside a
        fusion; without a weight, if all its inputs are INT8, or queries, keys and values of a fused attention with a
        mask. Every other kernel has the widest floating type among its tensors.
        """
        types = [tensor.dtype for tensor in self.inputs]
        if self.is_weighted:
            weight = self.weight
            attends = "mha" in self.name and types.count("int8") == 3  # the fourth input is its mask
            if weight is None and types and (attends or set(types) == {"int8"}):
                return "int8"
            quantizes_inside = self._is_weighted_fusion and "Roun" in self.operations
            if weight is not None and weight.dtype == "int8" and ("int8" in types or quantizes_inside):
                return "int8"
        every = {t.dtype for t in (*self.inputs, *self.outputs)}
        order = ("fp32", "bf16", "fp16", "fp8", "int8", "int32", "int64", "bool")
        return next((dtype for dtype in order if dtype in every), "unknown")

    @property
    def operations(self) -> tuple[str, ...]:
        """Elementary steps of a generated kernel: `__myl_MulAddReluCast_myl0_2` -> Mul, Add, Relu, Cast."""
        match = re.match(r"__myl_([A-Za-z]+)", self.name)
        return tuple(re.findall(r"[A-Z][a-z0-9]*", match.group(1))) if match else ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Layer:
        """Inverse of `to_dict`."""
        tensors: dict[str, Any] = {
            key: tuple(LayerTensor(t["name"], t["dtype"], tuple(t["shape"])) for t in values[key])
            for key in ("inputs", "constants", "outputs")
        }
        return Layer(
            name=values["name"],
            kind=values["kind"],
            onnx_nodes=tuple(values["onnx_nodes"]),
            tactic=values["tactic"],
            profile=values["profile"],
            **tensors,
        )


def short_type(text: str) -> str:
    """A short type name from any of TensorRT's spellings: "Half", "Row major linear FP16 format", "Int8" ..."""
    for name, pattern in _TYPES:
        if re.search(pattern, text, re.IGNORECASE):
            return name
    return "unknown"


def onnx_nodes_in(metadata: str) -> tuple[str, ...]:
    """Node names in a layer's metadata, each once, in order."""
    return tuple(dict.fromkeys(_ONNX_LAYER.findall(metadata)))


def assign_profiles(layers: list[Layer]) -> list[Layer]:
    """Clean names and number the profiles.

    TensorRT marks only some tensors with " [profile 1]"; all layers of one subgraph (`_myl1_`) share its profile.
    """
    groups: dict[str, int] = {}
    for layer in layers:
        texts = [layer.name, *(t.name for t in (*layer.inputs, *layer.outputs))]
        marks = [int(found.group(1)) for text in texts if (found := _PROFILE.search(text))]
        suffix = _MYELIN_SUFFIX.search(layer.name)
        if marks and suffix:
            groups[suffix.group(1)] = marks[0]
    result = []
    for layer in layers:
        own = _PROFILE.search(layer.name)
        suffix = _MYELIN_SUFFIX.search(layer.name)
        profile = int(own.group(1)) if own else groups.get(suffix.group(1), 0) if suffix else 0
        result.append(replace(layer, name=_PROFILE.sub("", layer.name), profile=profile))
    return result


def layers_from_inspector(text: str) -> list[Layer]:
    """Layers from `EngineInspector.get_engine_information(JSON)`.

    TensorRT 10 writes a tensor's type as "Format/Datatype", 11 as "Datatype" beside "Format".

    Raises:
        EngineError: not the inspector's JSON, or an engine built without detailed profiling verbosity.
    """
    try:
        entries = list(json.loads(text)["Layers"])
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"This is not the engine inspector's JSON: {error!r}.") from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise EngineError(
            "The engine holds layer names only. Build it with profiling_verbosity DETAILED (build_engine.py does; "
            "trtexec: --profilingVerbosity=detailed)."
        )
    return assign_profiles([_layer(entry) for entry in entries])


def _layer(entry: Mapping[str, Any]) -> Layer:
    constants = _tensors(entry.get("Constants", []))
    weights = entry.get("Weights")
    if isinstance(weights, dict) and weights.get("Count"):
        constants = (*constants, LayerTensor("weights", short_type(str(weights.get("Type"))), (weights["Count"], 2)))
    return Layer(
        name=str(entry.get("Name", "")),
        kind=str(entry.get("ParameterType") or entry.get("LayerType", "unknown")),
        inputs=_tensors(entry.get("Inputs", [])),
        constants=constants,
        outputs=_tensors(entry.get("Outputs", [])),
        onnx_nodes=onnx_nodes_in(str(entry.get("Metadata", ""))),
        tactic=str(entry.get("TacticName", "")),
    )


def _tensors(entries: Iterable[Mapping[str, Any]]) -> tuple[LayerTensor, ...]:
    tensors = []
    for entry in entries:
        spelled = entry.get("Datatype") or entry.get("DataType") or entry.get("Format/Datatype") or ""
        dims = entry.get("Dimensions", [])
        # A sentence instead of a list where the shape is not known yet.
        shape = tuple(int(size) for size in dims) if isinstance(dims, list) else ()
        tensors.append(LayerTensor(str(entry.get("Name", "")), short_type(str(spelled)), shape))
    return tuple(tensors)
