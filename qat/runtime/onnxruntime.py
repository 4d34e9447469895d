"""ONNX Runtime on the CPU: the reference for a Q/DQ file's numbers, and a speed baseline.

By default ONNX Runtime changes a Q/DQ file's numbers: on CPUs without VNNI the integer kernels saturate
at 16 bits, and the Q/DQ transformers quantize biases and weights that the file leaves float. The reference
mode therefore runs the file literally (`session.disable_quant_qdq`), which costs speed.

"Pad_Fusion" is switched off in both modes: in ONNX Runtime 1.30 (not in 1.32) it moves a Pad with zeros into the
MaxPool behind it, which pads with minus infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qat.errors import RunnerError
from qat.runtime.runner import Array, Arrays, TensorSpec, check_inputs

_NUMPY_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


class OnnxRuntimeRunner:
    """Runs an ONNX file on the CPU.

    Args:
        model: path of the file (external data beside it is found), or a serialized ModelProto.
        reference: True runs the file literally, for accuracy; False lets ONNX Runtime fuse to integer
            kernels, with full-range accumulation (`session.x64quantprecision`), for speed.
        threads: threads inside one operator; 0 leaves the choice to ONNX Runtime.

    Raises:
        RunnerError: ONNX Runtime refuses the file; its message is kept.
    """

    def __init__(self, model: str | Path | bytes, reference: bool = True, threads: int = 0) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        if reference:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        else:
            options.add_session_config_entry("session.x64quantprecision", "1")
        source = model if isinstance(model, bytes) else str(model)
        where = "given as bytes" if isinstance(model, bytes) else f"'{model}'"
        try:
            self._session: Any = ort.InferenceSession(
                source, options, providers=["CPUExecutionProvider"], disabled_optimizers=["Pad_Fusion"]
            )
        except Exception as error:
            raise RunnerError(f"ONNX Runtime cannot load the model {where}: {error}") from error
        self.reference = reference
        self.inputs = [_spec(node) for node in self._session.get_inputs()]
        self.outputs = [_spec(node) for node in self._session.get_outputs()]

    @property
    def input_names(self) -> list[str]:
        """Graph inputs, in the file's order."""
        return [spec.name for spec in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """Graph outputs, in the file's order."""
        return [spec.name for spec in self.outputs]

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Execute once.

        Raises:
            RunnerError: names, types or shapes do not fit, or ONNX Runtime fails.
        """
        check_inputs(inputs, self.inputs)
        try:
            results = self._session.run(self.output_names, dict(inputs))
        except Exception as error:
            raise RunnerError(f"ONNX Runtime failed while running the model: {error}") from error
        return dict(zip(self.output_names, results, strict=True))


def _spec(node: Any) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else None for size in node.shape)
    return TensorSpec(node.name, _NUMPY_TYPES.get(node.type, node.type), shape)
