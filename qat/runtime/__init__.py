"""One Runner interface over torch and ONNX Runtime; TensorRT's is `qat.tensorrt.TensorRTRunner`."""

from qat.runtime.onnxruntime import OnnxRuntimeRunner
from qat.runtime.runner import Arrays, Runner, TensorSpec, check_inputs, fixed_batch, run_in_batches, run_padded
from qat.runtime.torch import TorchRunner

__all__ = [
    "Arrays",
    "OnnxRuntimeRunner",
    "Runner",
    "TensorSpec",
    "TorchRunner",
    "check_inputs",
    "fixed_batch",
    "run_in_batches",
    "run_padded",
]
