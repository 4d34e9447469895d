"""A torch model named on the command line as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from qat.errors import RunnerError


def make_torch(spec: str) -> Any:
    """The model of `package.module:function`; the working directory is searched last.

    Raises:
        RunnerError: there is no such function, or it fails.
    """
    module, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise RunnerError(f"--torch {spec} cannot be made: {error}. Write package.module:function.") from error
