"""Writing Q/DQ ONNX files for TensorRT's explicit quantization, and checking them against torch."""

from qat.onnx.exporter import ExportReport, export
from qat.onnx.lint import FixReport, LintReport, assert_clean, fix, lint
from qat.onnx.parity import check_parity
from qat.onnx.report import LayerParity, OutputParity, ParityReport
from qat.onnx.typing import HalfReport, to_fp16

__all__ = [
    "ExportReport",
    "FixReport",
    "HalfReport",
    "LayerParity",
    "LintReport",
    "OutputParity",
    "ParityReport",
    "assert_clean",
    "check_parity",
    "export",
    "fix",
    "lint",
    "to_fp16",
]
