"""Finding, and partly repairing, what keeps TensorRT from running a Q/DQ file in INT8."""

from qat.onnx.lint.findings import Finding, Issue, LintReport, Rule, Severity
from qat.onnx.lint.linter import RULES, assert_clean, lint
from qat.onnx.lint.repair import FixReport, fix

__all__ = [
    "RULES",
    "Finding",
    "FixReport",
    "Issue",
    "LintReport",
    "Rule",
    "Severity",
    "assert_clean",
    "fix",
    "lint",
]
