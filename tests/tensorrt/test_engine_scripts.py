import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from qat.runtime import OnnxRuntimeRunner

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(path: Path, engine: Path, *more: str) -> int:
    shapes = ["--minShapes", "input:1x3x16x16", "--optShapes", "input:8x3x16x16", "--maxShapes", "input:16x3x16x16"]
    common = ["--onnx", str(path), "--saveEngine", str(engine), "--computeCapabilities", "8.9", "--quiet"]
    return _script("build_engine").main([*common, *shapes, "--library", "tensorrt_rtx", *more])


def test_build_reports_coverage_and_reuses(write_toy, tmp_path, rtx, capsys) -> None:
    path, engine = write_toy(), tmp_path / "e.engine"
    page, details = tmp_path / "p.html", tmp_path / "l.json"
    assert _build(path, engine, "--min-int8", "90", "--html", str(page), "--exportLayerInfo", str(details)) == 0
    assert "INT8: 100.0 % (4 of 4" in capsys.readouterr().out
    assert json.loads(details.read_text())["summary"]["int8_coverage_percent"] == 100.0
    assert page.read_text().count("<rect") > 4
    assert _build(path, engine) == 0
    assert "reused" in capsys.readouterr().out
    assert _build(path, engine, "--rebuild", "--memPoolSize", "workspace:1G") == 0
    assert "workspace_bytes" in capsys.readouterr().out


def test_min_int8_fails_a_float_model(write_toy, tmp_path, rtx, capsys) -> None:
    assert _build(write_toy("fp16"), tmp_path / "e.engine", "--min-int8", "90") == 1
    error = capsys.readouterr().err
    assert "INT8 coverage is 0.0 %" in error and "conv1_relu" in error


def test_build_errors_are_one_sentence_and_status_1(tmp_path, rtx, capsys) -> None:
    assert _build(tmp_path / "none.onnx", tmp_path / "e.engine") == 1
    assert capsys.readouterr().err.startswith("error: There is no ONNX file")


@pytest.mark.parametrize(
    ("text", "size"),
    [("workspace:512M", 2**29), ("workspace:1", 2**20), ("2G", 2**31), ("workspace:0.5K", 512), ("16B", 16)],
)
def test_workspace_sizes_as_trtexec_spells_them(text, size) -> None:
    assert _script("build_engine").parse_workspace(text) == size


def test_inspect_reads_the_manifest_without_a_gpu(write_toy, tmp_path, rtx, capsys) -> None:
    path, engine = write_toy("qdq", float_layers=("mid",)), tmp_path / "e.engine"
    assert _build(path, engine) == 0
    inspect = _script("inspect_engine").main
    assert inspect(["--engine", str(engine), "--onnx", str(path), "--min-int8", "70"]) == 0
    out = capsys.readouterr().out
    assert "INT8: 75.0 %" in out and "module conv2" in out
    assert inspect(["--engine", str(engine), "--onnx", str(path), "--min-int8", "80"]) == 1
    assert inspect(["--layerInfo", str(tmp_path / "none.json")]) == 1


def test_benchmark_sweeps_onnx_runtime(write_toy, tmp_path, capsys) -> None:
    path, report, plot = write_toy(), tmp_path / "r.json", tmp_path / "p.png"
    arguments = ["--onnx", str(path), "--shapes", "input:1x3x16x16", "--iterations", "3", "--warmUp", "1"]
    extra = ["--batches", "1,4", "--json", str(report), "--plot", str(plot)]
    assert _script("benchmark").main([*arguments, *extra]) == 0
    result = json.loads(report.read_text())
    assert [point["batch"] for point in result["sweep"]] == [1, 4]
    assert all(point["latency"]["median_ms"] > 0 for point in result["sweep"])
    assert result["environment"]["packages"]["onnxruntime"] and plot.read_bytes().startswith(b"\x89PNG")


def test_benchmark_says_why_a_batch_cannot_run(write_toy, capsys) -> None:
    arguments = ["--onnx", str(write_toy()), "--shapes", "input:1x3x15", "--iterations", "1", "--batches", "1"]
    assert _script("benchmark").main(arguments) == 0
    assert "takes" in capsys.readouterr().out


def test_benchmark_measures_torch(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "tiny_model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(4, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--torch", "tiny_model:make", "--shapes", "x:2x4", "--iterations", "2"]
    assert _script("benchmark").main(arguments) == 0
    assert _script("benchmark").main(["--torch", "no_such:thing", "--shapes", "x:2x4"]) == 1
    sys.modules.pop("tiny_model", None)


def test_verify_compares_with_test_data(write_toy, tmp_path) -> None:
    from onnx import numpy_helper

    path = write_toy()
    x = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)
    y = OnnxRuntimeRunner(path).run({"input": x})["logits"]
    folder = tmp_path / "data" / "test_data_set_0"
    folder.mkdir(parents=True)
    (folder / "input_0.pb").write_bytes(numpy_helper.from_array(x).SerializeToString())
    (folder / "output_0.pb").write_bytes(numpy_helper.from_array(y).SerializeToString())
    arguments = ["--onnx", str(path), "--shapes", "input:1x3x16x16", "--iterations", "1", "--reference"]
    arguments += ["--verify", str(tmp_path / "data")]
    assert _script("benchmark").main(arguments) == 0
    (folder / "output_0.pb").write_bytes(numpy_helper.from_array(y + 1).SerializeToString())
    assert _script("benchmark").main(arguments) == 1
