#!/usr/bin/env python
"""`qat benchmark` from the checkout, installed or not: models on TensorRT, ONNX Runtime and torch side by side."""

from __future__ import annotations

from _common import run_main
from qat.cli.benchmark import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    run_main(main)
