"""The TensorRT stage of a run, on a small Q/DQ file."""

import dataclasses
import json
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import qat
from qat.errors import EngineError
from qat.tensorrt import api, load_library
from recipes import engines
from recipes.config import DataConfig, ExportConfig, RunConfig, TensorRTConfig

CONFIG = RunConfig(data=DataConfig(image_size=16, eval_batch_size=8), tensorrt=TensorRTConfig(library="tensorrt_rtx"))


@pytest.fixture(scope="module")
def library():
    try:
        return load_library("tensorrt_rtx")
    except EngineError as error:
        pytest.skip(f"needs tensorrt_rtx: {error}")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A Q/DQ file with one convolution quantized and the first left float."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(2, 3, 16, 16)
    qat.quantize_(model, exclude=["0"])
    qat.calibrate(model, [x], method="max")
    path = tmp_path_factory.mktemp("engines") / "m.onnx"
    qat.export(model, (x,), path)
    return path


@pytest.fixture
def file(source, tmp_path) -> Path:
    copy = tmp_path / source.name
    copy.write_bytes(source.read_bytes())
    return copy


def test_never_skips_and_says_so(tmp_path) -> None:
    config = dataclasses.replace(CONFIG, tensorrt=TensorRTConfig(build="never"))
    assert engines.find_library(config) == "tensorrt.build is 'never'"
    entry = engines.tensorrt_entry(config, tmp_path / "none.onnx")
    assert engines.tensorrt_line(entry) == "TensorRT: no engine was built: tensorrt.build is 'never'"


def test_a_missing_library_is_a_sentence_or_an_error(monkeypatch) -> None:
    monkeypatch.setattr(api, "_import", lambda name: None)
    api._load.cache_clear()
    try:
        why = engines.find_library(CONFIG)
        assert isinstance(why, str) and "not installed" in why and "pip install" in why
        with pytest.raises(EngineError, match="not installed"):
            engines.find_library(dataclasses.replace(CONFIG, tensorrt=TensorRTConfig(build="always")))
    finally:
        api._load.cache_clear()


def test_profiles_are_one_image_and_up_to_the_evaluation_batch() -> None:
    one, many = engines.make_profiles(CONFIG, "x")
    assert (one["x"].min, one["x"].opt, one["x"].max) == ((1, 3, 16, 16),) * 3
    assert (many["x"].min, many["x"].opt, many["x"].max) == ((1, 3, 16, 16), (8, 3, 16, 16), (8, 3, 16, 16))
    single = dataclasses.replace(CONFIG, data=DataConfig(image_size=16, eval_batch_size=1))
    assert len(engines.make_profiles(single, "x")) == 1


def test_the_half_file_keeps_int8_and_the_original(file) -> None:
    before = file.read_bytes()
    half = engines.half_file(file)
    assert half == file.with_name("m.fp16.onnx") and file.read_bytes() == before
    types = {tensor.data_type for tensor in onnx.load(half).graph.initializer}
    assert {onnx.TensorProto.INT8, onnx.TensorProto.FLOAT16} <= types


def test_the_entry_counts_and_names_what_is_float(file, library) -> None:
    entry = engines.tensorrt_entry(CONFIG, file)
    assert "m.fp16.engine" in json.dumps(entry)
    assert (entry["onnx"], entry["remainder"], entry["engine"]) == ("m.fp16.onnx", "fp16", "m.fp16.engine")
    assert (entry["int8_layers"], entry["weighted_layers"], entry["int8_coverage_percent"]) == (1, 2, 50.0)
    assert [op["module"] for op in entry["not_int8"]] == ["0"]
    assert entry["engine_bytes"] == file.with_name("m.fp16.engine").stat().st_size
    line = engines.tensorrt_line(entry)
    assert "1 of 2 weighted layers in INT8 (50.0 %)" in line
    if not torch.cuda.is_available():
        assert entry["target"] == "compute capability 8.9" and "Not executed here: no GPU" in line


def test_a_float32_remainder_builds_the_file_itself(file, library) -> None:
    config = dataclasses.replace(CONFIG, tensorrt=dataclasses.replace(CONFIG.tensorrt, remainder="float32"))
    entry = engines.tensorrt_entry(config, file)
    assert (entry["onnx"], entry["int8_layers"]) == ("m.onnx", 1)
    assert not file.with_name("m.fp16.onnx").exists()


def test_too_little_int8_ends_the_run(file, library) -> None:
    limit = dataclasses.replace(CONFIG.tensorrt, min_int8=60.0)
    with pytest.raises(EngineError, match=r"coverage is 50\.0 %.*60"):
        engines.tensorrt_entry(dataclasses.replace(CONFIG, tensorrt=limit), file)
    limit = dataclasses.replace(CONFIG.tensorrt, min_int8=50.0)
    assert engines.tensorrt_entry(dataclasses.replace(CONFIG, tensorrt=limit), file)["int8_layers"] == 1


def test_engines_are_reused_until_something_changes(file, library) -> None:
    assert not engines.build_for(CONFIG, library, file).stored.reused
    assert engines.build_for(CONFIG, library, file).stored.reused
    larger = dataclasses.replace(CONFIG, data=DataConfig(image_size=16, eval_batch_size=16))
    changed = engines.build_for(larger, library, file).stored
    assert not changed.reused and "profiles" in changed.why_built


def test_a_file_with_a_fixed_batch_has_no_profiles(library, tmp_path) -> None:
    path = tmp_path / "fixed.onnx"
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten())
    qat.export(model, (torch.randn(2, 3, 16, 16),), path, dynamic_batch=False)
    config = dataclasses.replace(CONFIG, export=ExportConfig(dynamic_batch=False))
    built = engines.build_for(config, library, path)
    assert built.stored.manifest["options"]["profiles"] == []
    assert len(built.inspection.operations) == 1
