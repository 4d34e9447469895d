"""transformers is optional."""

import subprocess
import sys

import pytest

from qat.errors import ConfigError
from qat.huggingface import load_transformers


def test_importing_qat_does_not_import_transformers() -> None:
    code = "import sys, qat, qat.huggingface; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'qat\[transformers\]'"):
        load_transformers()
