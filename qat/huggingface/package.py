"""The optional package transformers, imported in use only."""

from __future__ import annotations

import importlib
from typing import Any

from qat.errors import ConfigError


def load_transformers(part: str = "") -> Any:
    """The package, or a part of it such as "masking_utils".

    Raises:
        ConfigError: it is not installed, or too old to have that part.
    """
    try:
        return importlib.import_module(f"transformers.{part}" if part else "transformers")
    except ImportError as error:
        raise ConfigError(
            f"the package transformers cannot be imported ({error}). Install it: pip install 'qat[transformers]'."
        ) from error
