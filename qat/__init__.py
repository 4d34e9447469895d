"""Quantization-aware training for PyTorch models that run in INT8 on TensorRT.

model = qat.prepare(model, example_inputs)         # quantizers where TensorRT wants them, in place
qat.calibrate(model, batches, method="entropy")    # amax of every quantizer: the PTQ model
...                                                # your training loop, or qat.training.fine_tune: the QAT model
qat.export(model, example_inputs, "model.onnx")    # Q/DQ file for TensorRT
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qat import calib, nn, quant_modules, tensor_quant
from qat.calibration import calibrate, calibrate_model, collect_stats, compare_methods, compute_amax, use_histograms
from qat.convert import ConversionReport, quantize_
from qat.descriptor import QuantDescriptor
from qat.fake_quant import fake_quantize
from qat.quantizer import (
    AmaxMode,
    QuantizerState,
    TensorQuantizer,
    name_quantizers,
    named_quantizers,
    set_quantizer_state,
)
from qat.summary import Summary, summary

if TYPE_CHECKING:
    from qat.onnx import check_parity, export
    from qat.placement.folding import fold_batch_norm_
    from qat.placement.prepare import prepare

__version__ = "0.1.0"
__all__ = [
    "AmaxMode",
    "ConversionReport",
    "QuantDescriptor",
    "QuantizerState",
    "Summary",
    "TensorQuantizer",
    "calib",
    "calibrate",
    "calibrate_model",
    "check_parity",
    "collect_stats",
    "compare_methods",
    "compute_amax",
    "export",
    "fake_quantize",
    "fold_batch_norm_",
    "name_quantizers",
    "named_quantizers",
    "nn",
    "prepare",
    "quant_modules",
    "quantize_",
    "set_quantizer_state",
    "summary",
    "tensor_quant",
    "use_histograms",
]

_LAZY = {
    "check_parity": "qat.onnx",
    "export": "qat.onnx",
    "fold_batch_norm_": "qat.placement",
    "prepare": "qat.placement",
}
_PARTS = (
    "debug",
    "huggingface",
    "onnx",
    "placement",
    "ptq",
    "report",
    "runtime",
    "sensitivity",
    "tensorrt",
    "training",
)


def __getattr__(name: str) -> Any:
    """Import the parts that not every user needs, and what they depend on, when they are first used."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"qat.{name}")
    raise AttributeError(f"module 'qat' has no attribute {name!r}")
