"""scripts/run_model.py and scripts/benchmark.py on ONNX Runtime and torch."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from qat.runtime import OnnxRuntimeRunner

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    """script(name) -> the module."""
    monkeypatch.syspath_prepend(SCRIPTS)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def _write(path: Path, batch: int | str = "n", noise: float = 0.0, half: bool = False, side: int | str = 8) -> Path:
    """[N, 3, side, side] -> mean over the image -> 4 classes."""
    dtype = np.float16 if half else np.float32
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3, 4)).astype(np.float32)
    weight += noise * rng.standard_normal((3, 4)).astype(np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "classes",
        [helper.make_tensor_value_info("image", kind, [batch, 3, side, side])],
        [helper.make_tensor_value_info("logits", kind, [batch, 4])],
        [numpy_helper.from_array(weight.astype(dtype), "weight")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def _samples(folder: Path, count: int) -> np.ndarray:
    folder.mkdir()
    x = np.random.default_rng(1).standard_normal((count, 3, 8, 8)).astype(np.float32)
    for index, sample in enumerate(x):
        np.save(folder / f"s{index}.npy", sample)
    return x


@pytest.mark.parametrize("batch", ["n", 2, 16])
def test_every_sample_of_a_folder_gets_its_outputs(batch, script, tmp_path, capsys) -> None:
    model, x = _write(tmp_path / "m.onnx", batch), _samples(tmp_path / "in", 5)
    out = tmp_path / "out"
    arguments = ["--onnx", str(model), "--inputs", str(tmp_path / "in"), "--batch", "4", "--saveOutputs", str(out)]
    assert script("run_model").main(arguments) == 0
    expected = OnnxRuntimeRunner(_write(tmp_path / "dynamic.onnx")).run({"image": x})["logits"]
    saved = np.stack([np.load(out / f"s{index}.npz")["logits"] for index in range(5)])
    np.testing.assert_allclose(saved, expected, rtol=1e-6, atol=1e-6)
    text = capsys.readouterr().out
    assert "5 samples" in text and "logits" in text and f"{expected.max():.5g}" in text


def test_two_models_are_compared_on_images(script, tmp_path, capsys) -> None:
    rng = np.random.default_rng(2)
    for index in range(5):
        pixels = rng.integers(0, 256, (12, 10, 3), np.uint8)
        (tmp_path / "in" / f"class{index % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "in" / f"class{index % 2}" / f"{index}.png")
    model, near = _write(tmp_path / "m.onnx"), _write(tmp_path / "near.onnx", batch=2, noise=0.01, half=True)
    arguments = ["--onnx", str(model), "--inputs", str(tmp_path / "in"), "--batch", "3", "--compare", str(near)]
    run = script("run_model").main
    assert run([*arguments, "--min-sqnr", "20"]) == 0
    assert "SQNR dB" in capsys.readouterr().out
    assert run([*arguments, "--min-sqnr", "90"]) == 1
    assert "Below --min-sqnr 90: 'logits'" in capsys.readouterr().err


def test_open_image_sizes_take_the_one_given(script, tmp_path, capsys) -> None:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (20, 20), (255, 0, 0)).save(tmp_path / "in" / "red.png")
    arguments = ["--onnx", str(_write(tmp_path / "m.onnx", side="side")), "--inputs", str(tmp_path / "in")]
    assert script("run_model").main(arguments) == 1
    assert "open in size" in capsys.readouterr().err
    assert script("run_model").main([*arguments, "--size", "16", "--mean", "0,0,0", "--std", "1,1,1"]) == 0
    weight = numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[0])
    assert f"{weight[0].max():.5g}" in capsys.readouterr().out


def test_test_data_sets_are_compared_with_what_is_expected(script, tmp_path, capsys) -> None:
    model, x = _write(tmp_path / "m.onnx"), np.ones((2, 3, 8, 8), np.float32)
    y = OnnxRuntimeRunner(model).run({"image": x})["logits"]
    folder = tmp_path / "data" / "test_data_set_0"
    folder.mkdir(parents=True)
    (folder / "input_0.pb").write_bytes(numpy_helper.from_array(x).SerializeToString())
    run, arguments = script("run_model").main, ["--onnx", str(model), "--inputs", str(tmp_path / "data")]
    assert run(arguments) == 1
    assert "no output_0.pb" in capsys.readouterr().err
    (folder / "output_0.pb").write_bytes(numpy_helper.from_array(y).SerializeToString())
    assert run(arguments) == 0
    assert "1 test data sets agree" in capsys.readouterr().out
    (folder / "output_0.pb").write_bytes(numpy_helper.from_array(y + 1).SerializeToString())
    assert run(arguments) == 1
    assert "8 of 8 values differ, by up to 1" in capsys.readouterr().err
    assert run([*arguments, "--compare", str(model)]) == 1
    assert "are for samples" in capsys.readouterr().err


def test_models_are_measured_side_by_side(script, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "tiny_for_benchmark.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    report, plot = tmp_path / "r.json", tmp_path / "p.png"
    models = ["--onnx", str(_write(tmp_path / "m.onnx")), "--torch", "tiny_for_benchmark:make"]
    how = ["--shapes", "image:1x3x8x8", "--iterations", "3", "--warmUp", "1", "--batches", "1,4"]
    assert script("benchmark").main([*models, *how, "--json", str(report), "--plot", str(plot)]) == 0
    sys.modules.pop("tiny_for_benchmark", None)
    result = json.loads(report.read_text())
    assert [m["backend"] for m in result["models"]] == ["onnxruntime fast", "torch eager on cpu"]
    for model in result["models"]:
        assert [point["batch"] for point in model["sweep"]] == [1, 4]
        assert all(point["latency"]["median_ms"] > 0 for point in model["sweep"])
        assert set(model["details"]) == {"1", "4"}
    assert result["environment"]["packages"]["onnxruntime"] and plot.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert out.count("m.onnx") >= 2 and "samples/s" in out


def test_a_batch_that_cannot_run_says_why(script, tmp_path, capsys) -> None:
    arguments = ["--onnx", str(_write(tmp_path / "m.onnx", batch=2)), "--shapes", "image:1x3x8x8", "--iterations", "1"]
    assert script("benchmark").main([*arguments, "--batches", "1,2"]) == 0
    assert "m.onnx on onnxruntime fast, batch 1: Input 'image' has shape" in capsys.readouterr().out


def test_what_cannot_be_measured_is_an_error(script, capsys) -> None:
    main = script("benchmark").main
    assert main(["--shapes", "x:1"]) == 1
    assert "Nothing to measure" in capsys.readouterr().err
    assert main(["--torch", "no_such:thing", "--shapes", "x:2x4"]) == 1
    assert "package.module:function" in capsys.readouterr().err
