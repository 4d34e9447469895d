"""What to do about an error of TensorRT's ONNX parser or builder.

The rules are those of the linter (`qat.onnx.lint`), seen from the other side: the linter finds the same faults before
TensorRT does.
"""

from __future__ import annotations

import re

_ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"zero.?point",
        "TensorRT takes symmetric INT8 only: every zero-point must be an int8 zero. Export again with qat.export.",
    ),
    (
        r"scale.*(positive|> ?0|negative)|(positive|negative).*scale",
        "A scale is zero or negative: its channel is dead or its quantizer was not calibrated. Calibrate again.",
    ),
    (
        r"QLinear|ConvInteger|MatMulInteger",
        "Export QuantizeLinear/DequantizeLinear pairs around float operators instead.",
    ),
    (r"uint8", "TensorRT quantizes to signed INT8 only. Export again with int8 weights and zero-points."),
    (
        r"No importer registered|plugin",
        "TensorRT has no such operator. Export the layer as standard ONNX operators, or leave it out of the graph.",
    ),
    (
        r"bias|int32",
        "Biases stay float in a Q/DQ file: remove the DequantizeLinear in front of the bias.",
    ),
    (
        r"type|cast",
        "In a strongly typed network both inputs of an operator need one type: insert a Cast, or export again.",
    ),
    (r"opset", "Export with opset 13 or later; 21 is the default of qat.export."),
)


def advice_for(operator: str, message: str) -> str:
    """One sentence for a parser error, or an empty string where nothing is known."""
    text = f"{operator} {message}"
    for pattern, advice in _ADVICE:
        if re.search(pattern, text, re.IGNORECASE):
            return advice
    return ""


def build_advice(errors: list[str]) -> str:
    """One sentence for the errors of a failed build, or an empty string."""
    text = " ".join(errors)
    if re.search(r"workspace", text, re.IGNORECASE):
        return "Raise the workspace limit (--memPoolSize=workspace:SIZE)."
    if re.search(r"lean", text):
        return "A version-compatible engine needs the package tensorrt_lean's libraries."
    if re.search(r"CUDA_SUCCESS|driver|cudaError", text):
        return "This build needs a CUDA GPU and driver (refit and weight stripping do, for instance)."
    if re.search(r"out of memory|OutOfMemory", text, re.IGNORECASE):
        return "Lower the profile's maximum shapes or the workspace limit, or free GPU memory."
    if re.search(r"no implementation|could not find any implementation", text, re.IGNORECASE):
        return "Raise the workspace limit, or leave the layers that the message names in float."
    return ""
