import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def _scripts_import_each_other(monkeypatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


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
    details = tmp_path / "layers.json"
    assert _build(path, engine, "--exportLayerInfo", str(details)) == 0
    inspect = _script("inspect_engine").main
    assert inspect(["--layerInfo", str(details), "--onnx", str(path), "--min-int8", "70"]) == 0
    assert "INT8: 75.0 %" in capsys.readouterr().out
    assert inspect(["--engine", str(engine), "--onnx", str(path), "--min-int8", "70"]) == 0
    out = capsys.readouterr().out
    assert "INT8: 75.0 %" in out and "module conv2" in out
    assert inspect(["--engine", str(engine), "--onnx", str(path), "--min-int8", "80"]) == 1
    assert inspect(["--layerInfo", str(tmp_path / "none.json")]) == 1
    for text in ("[]", "{}", "no json"):
        details.write_text(text)
        assert inspect(["--layerInfo", str(details)]) == 1


def test_a_build_warns_where_tensorrt_changes_the_numbers_without_a_word(write_toy, tmp_path, rtx, capsys) -> None:
    path = write_toy()
    model = onnx.load(path)
    for item in model.graph.initializer:
        if item.name == "in.zero":
            item.CopyFrom(onnx.numpy_helper.from_array(np.zeros((), np.uint8), item.name))
    onnx.save(model, path)
    assert _build(path, tmp_path / "e.engine") == 0
    assert "warning: error   code-type: 'in/QuantizeLinear'" in capsys.readouterr().err
    assert _build(path, tmp_path / "e.engine") == 0
    assert capsys.readouterr().err == ""


def test_weight_streaming_budgets_as_trtexec_spells_them(capsys) -> None:
    parser = _script("run_model").make_parser()
    common = ["--engine", "e", "--inputs", "f", "--weightStreamingBudget"]
    for text in ("50%", "12.5%", "20M", "0"):
        assert parser.parse_args([*common, text]).weightStreamingBudget == text
    with pytest.raises(SystemExit):
        parser.parse_args([*common, "much"])
    assert "no size" in capsys.readouterr().err
