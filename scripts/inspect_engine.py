#!/usr/bin/env python
"""`qat inspect` from the checkout, installed or not: which layers of an engine run in INT8."""

from __future__ import annotations

from _common import run_main
from qat.cli.inspect import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    run_main(main)
