import subprocess
import sys
import types

import pytest

from qat.errors import EngineError
from qat.tensorrt import api


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    api._load.cache_clear()
    monkeypatch.delenv(api.LIBRARY_VARIABLE, raising=False)
    yield
    api._load.cache_clear()


def test_a_missing_library_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(api.importlib, "import_module", _not_found)
    with pytest.raises(EngineError, match=r"pip install 'qat\[tensorrt-rtx\]'"):
        api.load_library()
    with pytest.raises(EngineError, match="'tensorrt'"):
        api.load_library("tensorrt")


def _not_found(name: str):
    raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def test_libraries_that_do_not_load_are_explained(monkeypatch) -> None:
    def broken(name: str):
        raise ImportError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(api.importlib, "import_module", broken)
    with pytest.raises(EngineError, match="libnvinfer"):
        api.load_library("tensorrt")


def test_an_old_version_is_refused(monkeypatch) -> None:
    old = types.ModuleType("tensorrt")
    old.__file__, old.__version__ = "somewhere", "8.6.1"
    monkeypatch.setattr(api.importlib, "import_module", lambda name: old)
    with pytest.raises(EngineError, match=r"8\.6\.1 is too old.*10\.16"):
        api.load_library("tensorrt")


def test_a_folder_named_tensorrt_is_no_library(monkeypatch) -> None:
    monkeypatch.setattr(api.importlib, "import_module", types.ModuleType)
    with pytest.raises(EngineError, match="not installed"):
        api.load_library("tensorrt")


def test_the_environment_variable_chooses(monkeypatch) -> None:
    monkeypatch.setenv(api.LIBRARY_VARIABLE, "tensorflow")
    with pytest.raises(EngineError, match="tensorflow"):
        api.load_library()


def test_members_are_found_by_name(rtx) -> None:
    assert rtx.member("NetworkDefinitionCreationFlag", "STRONGLY_TYPED") is not None
    with pytest.raises(EngineError, match=r"no HardwareCompatibilityLevel\.LUNAR; it has NONE"):
        rtx.member("HardwareCompatibilityLevel", "LUNAR")


@pytest.mark.parametrize("outcome", [None, TypeError("factory function returned nullptr")])
def test_a_builder_that_does_not_start_without_a_gpu_is_explained(outcome) -> None:
    def start(logger):
        if outcome is not None:
            raise outcome

    fake = api.Library("tensorrt", "11.4", types.SimpleNamespace(Builder=start, Runtime=start), api.LogHub())
    for create in (fake.create_builder, fake.create_runtime):
        with pytest.raises(EngineError, match=r"needs a CUDA GPU.*tensorrt_rtx can build"):
            create()


def test_importing_the_package_imports_no_tensorrt() -> None:
    code = (
        "import sys, qat, qat.tensorrt, qat.runtime\n"
        "heavy = ('tensorrt', 'tensorrt_rtx', 'onnx', 'onnxruntime', 'matplotlib', 'jinja2')\n"
        "assert not [name for name in heavy if name in sys.modules], sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
