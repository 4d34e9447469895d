#!/usr/bin/env python
"""`qat build` from the checkout, installed or not: a TensorRT engine from an ONNX file."""

from __future__ import annotations

from _common import run_main
from qat.cli.build import main, make_parser, parse_workspace

__all__ = ["main", "make_parser", "parse_workspace"]

if __name__ == "__main__":
    run_main(main)
