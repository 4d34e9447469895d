"""The scripts, run as a user runs them, on a small network and real digits."""

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "--model.name=shufflenet_v2_x0_5",
    "--data.image_size=32",
    "--data.batch_size=128",
    "--float_train.epochs=6",
    "--float_train.lr=0.004",
    "--qat.epochs=1",
    "--quant.batches=2",
    "--tensorrt.build=never",
    "--export.threshold=10",
]


def script(name: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *SMALL, f"--output_dir={folder}", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, check=False, timeout=600)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classification") / "run"
    run = script("qat_finetune.py", folder)
    assert run.returncode == 0, run.stderr[-3000:]
    for text in ("float", "PTQ max", "PTQ entropy", "PTQ mse", "PTQ percentile=99.99", "QAT", "ONNX"):
        assert text in run.stdout
    return folder


def test_the_full_run_leaves_everything(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert results["environment"]["packages"]["torch"]
    assert len(results["ptq"]) == 5
    assert results["qat"][0]["seed"] == 0
    assert results["float"]["top1"] > 30, "the float model learned nothing, so nothing was compared"
    assert results["onnx"]["export"]["codes_that_differ"] == 0
    assert abs(results["onnx"]["metrics"]["top1"] - results["qat"][0]["metrics"]["top1"]) < 10
    assert "channels" in " ".join(results["left_float"].values())
    onnx.checker.check_model(str(finished / "qat.onnx"), full_check=True)
    assert (finished / "config.yaml").exists()
    assert (finished / "results.png").stat().st_size > 5000


def test_running_again_reuses_the_training_and_judges_the_onnx_file(finished: Path) -> None:
    before = (finished / "float" / "best.pt").stat().st_mtime
    again = script("qat_finetune.py", finished, "--export.threshold=-100")
    assert again.returncode == 1, again.stderr[-2000:]
    assert "FAILED: the ONNX file is" in again.stdout
    assert (finished / "float" / "best.pt").stat().st_mtime == before
    other = script("qat_finetune.py", finished, "--seed=3")
    assert other.returncode == 2
    assert "other settings (seed: 0 -> 3)" in other.stderr


def test_calibrate_evaluate_and_export_agree(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    calibrated = script("calibrate.py", finished, "--calibrator=max")
    assert calibrated.returncode == 0, calibrated.stderr[-2000:]
    assert "PTQ max" in calibrated.stdout
    assert "PTQ entropy" not in calibrated.stdout
    exported = script("export_onnx.py", finished, "--output", str(finished / "again.onnx"), "--export.opset=17")
    assert exported.returncode == 0, exported.stderr[-2000:]
    evaluated = script("evaluate.py", finished, "--file", str(finished / "again.onnx"))
    assert evaluated.returncode == 0, evaluated.stderr[-2000:]
    assert f"{results['onnx']['metrics']['top1']:.4f}" in evaluated.stdout
    fixed = script("export_onnx.py", finished, f"--output={finished}/fixed.onnx", "--export.dynamic_batch=false")
    assert fixed.returncode == 0, fixed.stderr[-2000:]
    one_by_one = script("evaluate.py", finished, "--file", str(finished / "fixed.onnx"))
    assert f"{results['onnx']['metrics']['top1']:.4f}" in one_by_one.stdout, one_by_one.stderr[-2000:]
    torch_side = script("evaluate.py", finished, "--file", str(finished / "qat" / "seed0" / "model.pt"))
    assert "quantized torch" in torch_side.stdout


def test_the_precision_of_the_remainder_is_chosen_at_export(finished: Path) -> None:
    path = finished / "half.onnx"
    exported = script("export_onnx.py", finished, "--precision=fp16", "--output", str(path))
    assert exported.returncode == 0, exported.stderr[-2000:]
    assert "precision: fp16" in exported.stdout
    model = onnx.load(path)
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert onnx.TensorProto.FLOAT16 in stored.values()
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert quantizers and {stored[node.input[1]] for node in quantizers} == {onnx.TensorProto.FLOAT}
    refused = script("export_onnx.py", finished, "--precision=fp64")
    assert refused.returncode == 2 and "fp64" in refused.stderr


def test_errors_are_one_line(tmp_path: Path) -> None:
    run = script("qat_finetune.py", tmp_path / "x", "--data-dir", "/nowhere", "--data.name=imagefolder")
    assert run.returncode == 2
    assert run.stderr.strip().splitlines()[-1].startswith("error: data.dir: the folder /nowhere/train does not exist")
