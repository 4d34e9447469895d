"""Layers from the build log of TensorRT for RTX: the only source of layer precision where there is no GPU.

With verbose logging and detailed profiling verbosity the log holds one message that begins `Layers:`, with one line
for each layer of each profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from qat.tensorrt.layers import Layer, LayerTensor, assign_profiles, onnx_nodes_in, short_type

_LAYER = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*),.*?Inputs: \[(?P<inputs>.*?)\]"
    r"(?:, Constants: \[(?P<constants>.*?)\])?, Outputs: \[(?P<outputs>.*?)\], TacticName: (?P<tactic>.*?), "
    r"StreamId: \d+.*?(?:, Metadata: ?(?P<metadata>.*))?$"
)
_TENSOR = re.compile(r"\{ Name: (.*?), Dimensions: \[([-\d,\s]*)\].*?Datatype: (\w+)")


def layers_from_log(messages: Iterable[str]) -> list[Layer]:
    """Layers of the last listing in the log; empty where there is none (TensorRT other than RTX).

    A line that cannot be read becomes a layer of kind "unknown", so that it is seen in the report.
    """
    listing = ""
    for message in messages:
        if message.lstrip().startswith("Layers:"):
            listing = message
    layers = []
    for line in listing.split("I/O Tensors:")[0].splitlines():
        if line.startswith("Name: "):
            match = _LAYER.match(line)
            layers.append(_from_match(match) if match else Layer(name=line[6:100], kind="unknown"))
    return assign_profiles(layers)


def _from_match(match: re.Match[str]) -> Layer:
    return Layer(
        name=match["name"],
        kind=match["kind"],
        inputs=_tensors(match["inputs"]),
        constants=_tensors(match["constants"] or ""),
        outputs=_tensors(match["outputs"]),
        onnx_nodes=onnx_nodes_in(match["metadata"] or ""),
        tactic=match["tactic"],
    )


def _tensors(text: str) -> tuple[LayerTensor, ...]:
    return tuple(
        LayerTensor(name, short_type(dtype), tuple(int(size) for size in dims.split(",") if size.strip()))
        for name, dims, dtype in _TENSOR.findall(text)
    )
