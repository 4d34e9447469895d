"""The console command `qat`: each part is a module with `main(arguments, prog)`, imported when it is asked for."""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import sys
from collections.abc import Callable, Sequence

from qat import __version__
from qat.errors import QatError

COMMANDS = {
    "lint": "find what keeps TensorRT from running an ONNX file in INT8; repair what is safe",
    "export": "write a torch model and a quantized checkpoint as a Q/DQ ONNX file",
    "build": "build a TensorRT engine, or reuse it, and say what runs in INT8",
    "inspect": "show which layers of an engine run in INT8, which do not and why",
    "benchmark": "measure models on TensorRT, ONNX Runtime and torch side by side",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `qat COMMAND ...`: the command's exit status, 2 for an error it leaves to us, 130 after Ctrl-C."""
    commands = "\n".join(f"  {name:11}{what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "qat",
        description="Quantization-aware training for PyTorch models that run in INT8 on TensorRT.",
        epilog=f"commands:\n{commands}\n\n`qat COMMAND --help` has the options of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"qat {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="command")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its options")
    given = parser.parse_args(arguments)
    module = importlib.import_module(f"qat.cli.{given.command}")
    return guard(lambda: module.main(given.options, f"qat {given.command}"))


def guard(run: Callable[[], int | None]) -> int:
    """The exit status of `run()`; an error of ours is one line on stderr and 2, Ctrl-C 130."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return run() or 0
    except QatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error}. Make room and run the same command again: it resumes", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return 130
