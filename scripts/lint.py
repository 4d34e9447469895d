#!/usr/bin/env python
"""`qat lint` from the checkout, installed or not: what keeps TensorRT from running an ONNX file in INT8."""

from __future__ import annotations

from _common import run_main
from qat.cli.lint import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    run_main(main)
