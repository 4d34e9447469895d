"""Loading with a stand-in for the runtime: deserializing needs a GPU."""

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch

from qat.errors import EngineError
from qat.tensorrt.api import Library
from qat.tensorrt.engine import load_engine
from qat.tensorrt.log import LogHub


class _Runtime:
    engine_host_code_allowed = False

    def __init__(self, logger) -> None:
        pass

    def deserialize_cuda_engine(self, plan: bytes) -> object | None:
        return None if plan.endswith(b"broken") else SimpleNamespace(plan=plan)


@pytest.fixture
def library(monkeypatch) -> Library:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return Library("tensorrt", "11.4", SimpleNamespace(Runtime=_Runtime), LogHub())


def _write(path, plan: bytes, version: str = "11.4", compatible: bool = False):
    path.write_bytes(plan)
    manifest = {"format": 1, "onnx_sha256": "", "options": {"version_compatible": compatible}, "library": "tensorrt"}
    manifest |= {"version": version, "gpu": None, "layers": [], "engine_sha256": hashlib.sha256(plan).hexdigest()}
    path.with_name(f"{path.name}.json").write_text(json.dumps(manifest))
    return path


def test_only_version_compatible_engines_may_bring_code(library, tmp_path) -> None:
    """TensorRT refuses such a plan unless the runtime is told that it is trusted."""
    plain = load_engine(_write(tmp_path / "a.engine", b"plan"), library)
    assert plain.engine.plan == b"plan" and not plain.runtime.engine_host_code_allowed
    older = _write(tmp_path / "b.engine", b"plan", "11.1", compatible=True)
    assert load_engine(older, library).runtime.engine_host_code_allowed
    (tmp_path / "b.engine.json").unlink()
    assert not load_engine(older, library).runtime.engine_host_code_allowed


def test_engines_of_another_version_and_broken_ones_are_refused(library, tmp_path) -> None:
    with pytest.raises(EngineError, match=r"built by tensorrt 11\.1"):
        load_engine(_write(tmp_path / "a.engine", b"plan", "11.1"), library)
    with pytest.raises(EngineError, match=r"cannot load .*b\.engine"):
        load_engine(_write(tmp_path / "b.engine", b"broken"), library)


def test_without_a_gpu_there_is_a_way_on(library, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match=r"inspect_engine\.py"):
        load_engine(_write(tmp_path / "a.engine", b"plan"), library)
