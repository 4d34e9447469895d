import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest

from qat.errors import EngineError
from qat.tensorrt.engine import check_plan
from qat.tensorrt.store import build_or_reuse, hash_onnx, manifest_path, read_manifest


@pytest.fixture
def built(write_toy, options, rtx, tmp_path):
    path = write_toy()
    engine = tmp_path / "toy.engine"
    first = build_or_reuse(path, engine, options, library=rtx)
    assert not first.reused
    return path, engine, options, rtx


def _again(built, **changes):
    path, engine, options, rtx = built
    return build_or_reuse(path, engine, dataclasses.replace(options, **changes), library=rtx)


def test_second_call_reuses_the_engine(built) -> None:
    before = built[1].read_bytes()
    again = _again(built)
    assert again.reused and built[1].read_bytes() == before
    assert {layer.precision for layer in again.layers if layer.is_weighted} == {"int8"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"optimization_level": 2}, "optimization_level"), ({"profiles": "first"}, "profiles"), ({"tf32": False}, "tf32")],
)
def test_a_changed_option_rebuilds_and_says_which(built, changes, named) -> None:
    if changes.get("profiles") == "first":
        changes = {"profiles": built[2].profiles[:1]}
    again = _again(built, **changes)
    assert not again.reused and named in again.why_built


def test_a_changed_model_rebuilds(built, write_toy) -> None:
    write_toy(channels=16, name=built[0].name)
    assert "onnx_sha256" in _again(built).why_built


@pytest.mark.parametrize("key", ["version", "gpu", "library"], ids=["version", "device", "library"])
def test_another_version_or_gpu_rebuilds(built, key) -> None:
    file = manifest_path(built[1])
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: "another"}))
    assert key in _again(built).why_built


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "flipped", "no manifest", "bad manifest", "list"])
def test_damaged_and_foreign_engines_are_rebuilt(built, damage) -> None:
    engine, file = built[1], manifest_path(built[1])
    plan = engine.read_bytes()
    if damage == "truncated":
        engine.write_bytes(plan[: len(plan) // 2])
    elif damage == "empty":
        engine.write_bytes(b"")
    elif damage == "foreign":
        engine.write_bytes(b"not an engine at all")
    elif damage == "flipped":
        engine.write_bytes(plan[:1000] + bytes([plan[1000] ^ 1]) + plan[1001:])
    elif damage == "no manifest":
        file.unlink()
    else:
        file.write_text("{" if damage == "bad manifest" else "[]")
    assert not _again(built).reused
    assert engine.read_bytes()[:4] == plan[:4] and _again(built).reused


def test_failed_build_keeps_the_old_engine(built) -> None:
    before = built[1].read_bytes()
    with pytest.raises(EngineError):
        _again(built, workspace_bytes=1024)
    assert built[1].read_bytes() == before and read_manifest(built[1])
    assert not list(built[1].parent.glob("*.tmp")) and not list(built[1].parent.glob(".*.tmp"))


def test_engine_does_not_overwrite_the_model(write_toy, options, rtx) -> None:
    path = write_toy()
    with pytest.raises(EngineError, match="overwrite"):
        build_or_reuse(path, path, options, library=rtx)


def test_external_data_counts(write_toy, tmp_path) -> None:
    model = onnx.load(write_toy("fp32"))
    path = tmp_path / "external.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = hash_onnx(path)
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "weights.bin").write_bytes(data)
    assert hash_onnx(path) != before
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(EngineError, match=r"weights\.bin"):
        hash_onnx(path)


_BUILD = """
import sys
from qat.tensorrt import BuildOptions, build_or_reuse, load_library, make_profiles
profiles = tuple(make_profiles([], ["input:1x3x16x16"], []))
options = BuildOptions(profiles=profiles, compute_capabilities=("8.9",))
print(build_or_reuse(sys.argv[1], sys.argv[2], options, library=load_library("tensorrt_rtx")).reused)
"""


def test_two_processes_build_once(write_toy, rtx, tmp_path) -> None:
    path, engine = write_toy(), tmp_path / "shared.engine"

    def run(_: int) -> str:
        command = [sys.executable, "-c", _BUILD, str(path), str(engine)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with ThreadPoolExecutor(2) as pool:
        reused = sorted(pool.map(run, range(2)))
    assert reused == ["False", "True"]
    assert read_manifest(engine)["engine_bytes"] == engine.stat().st_size


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04zip"])
def test_bad_plans_are_refused_before_loading(content, tmp_path: Path, rtx) -> None:
    path = tmp_path / "bad.engine"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineError, match=r"bad\.engine"):
        check_plan(path, rtx)


def test_a_plan_of_another_library_or_version_is_refused(built) -> None:
    _, engine, _, rtx = built
    plan, manifest = check_plan(engine, rtx)
    assert plan == engine.read_bytes() and manifest["options"]["version_compatible"] is False
    with pytest.raises(EngineError, match="TensorRT for RTX"):
        check_plan(engine, dataclasses.replace(rtx, name="tensorrt"))
    with pytest.raises(EngineError, match=r"9\.9"):
        check_plan(engine, dataclasses.replace(rtx, version="9.9"))
    engine.write_bytes(engine.read_bytes()[:-10])
    with pytest.raises(EngineError, match="truncated"):
        check_plan(engine, rtx)
