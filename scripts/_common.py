"""What every script does around its work: find the checkout, parse, say errors as one sentence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qat.errors import QatError


def run_main(main: Callable[[list[str]], int | None]) -> None:
    """Run `main(arguments)`; an error of ours becomes one line on stderr and exit code 2, Ctrl-C 130."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        code = main(sys.argv[1:])
    except QatError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        code = 130
    sys.exit(code)
