"""What every script does around its work: find the checkout, parse, say errors as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qat.cli import guard


def run_main(main: Callable[[list[str]], int | None]) -> None:
    """Run `main(arguments)`; an error of ours becomes one line on stderr and exit code 2, Ctrl-C 130."""
    sys.exit(guard(lambda: main(sys.argv[1:])))
