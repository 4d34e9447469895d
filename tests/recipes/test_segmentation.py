"""scripts/segmentation.py as a user runs it, on pages of real digits, very shortly trained."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image
from torch import nn

from qat.runtime import OnnxRuntimeRunner
from qat.runtime.data import load_test_sets
from recipes.config import build_parser
from recipes.segmentation import Segmentation
from recipes.segmentation_config import SegmentationConfig, parse_segmentation

pytest.importorskip("segmentation_models_pytorch", reason="needs segmentation-models-pytorch: 'qat[segmentation]'")
pytest.importorskip("torchmetrics", reason="needs torchmetrics: pip install 'qat[segmentation]'")

ROOT = Path(__file__).parents[2]
SMALL = [
    f"--config={ROOT / 'configs' / 'digits_unet.yaml'}",
    "--data.patches=96",
    "--float_train.epochs=3",
    "--qat.epochs=1",
    "--quant.batches=2",
    "--tensorrt.compute_capability=8.9",
    "--export.threshold=5",
]


def script(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "segmentation.py"), *SMALL, f"--output_dir={folder}", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, check=False, timeout=900)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segmentation") / "run"
    run = script(folder)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    for text in ("float", "PTQ max", "PTQ entropy", "PTQ mse", "PTQ percentile=99.99", "QAT", "ONNX Runtime"):
        assert text in run.stdout
    return folder


@pytest.fixture(scope="module")
def results(finished: Path) -> dict:
    return json.loads((finished / "results.json").read_text())


def test_the_run_leaves_results_of_every_stage(finished: Path, results: dict) -> None:
    (seed,) = results["seeds"]
    assert results["environment"]["packages"]["torch"]
    assert len(seed["ptq"]) == 4
    assert seed["float"]["dice_paper"] > 90, "the float model learned nothing, so nothing was compared"
    assert results["onnx"]["export"]["codes_that_differ"] == 0
    assert "segmentation_head.0" in seed["left_float"]
    model = onnx.load(finished / "qat.onnx")
    onnx.checker.check_model(model, full_check=True)
    dims = [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["batch", 3, "height", "width"]


def test_one_file_runs_at_every_size_and_is_what_torch_computes(results: dict) -> None:
    sizes = {row["size"]: row for row in results["onnx"]["sizes"]}
    assert set(sizes) == {"128x128", "1024x768"}
    for row in sizes.values():
        assert row["passed"] and row["codes_that_differ"] == 0 and row["largest_relative_difference"] < 1e-4
        assert row["end_to_end"]["same_pixels_percent"] > 99
        # Flips travel through both pairs: the file is no further from torch than torch is from itself.
        assert row["end_to_end"]["sqnr_db"] > row["torch_with_itself"]["sqnr_db"] - 6


def test_the_reference_is_a_test_set_that_any_runner_reads(finished: Path, results: dict) -> None:
    runner = OnnxRuntimeRunner(finished / "qat.onnx")
    (test,) = load_test_sets(finished, runner.input_names, runner.output_names)
    assert test.name == "test_data_set_0"
    (image,), (logits,) = test.inputs.values(), test.outputs.values()
    assert image.shape == (8, 3, 64, 64) and logits.shape == (8, 11, 64, 64)
    found = next(iter(runner.run(test.inputs).values()))
    assert (found.argmax(1) == logits.argmax(1)).mean() > 0.99
    assert results["deployment"]["reference"]["same_pixels_percent"] > 99
    assert set(results["deployment"]["times"]) == {"1", "8"}


def test_masks_are_written_in_the_values_of_the_data(finished: Path, results: dict) -> None:
    masks = finished / "masks"
    assert len(list(masks.glob("*_overlay.png"))) == len(list(masks.glob("*.pgm"))) == 24
    png, pgm = (np.asarray(Image.open(masks / f"0.{kind}")) for kind in ("png", "pgm"))
    assert np.array_equal(png, pgm) and png.shape == (128, 128) and set(np.unique(png)) <= set(range(11))
    assert Image.open(masks / "0_overlay.png").mode == "RGB"
    for picture in ("comparison.png", "results.png"):
        assert (finished / picture).stat().st_size > 5000
    tiled, whole = results["deployment"]["tiled"], results["deployment"]["metrics"]
    assert abs(tiled["dice_paper"] - whole["dice_paper"]) < 5


def test_the_engine_has_two_profiles_and_is_reused(finished: Path, results: dict) -> None:
    entry = results["tensorrt"]
    if "skipped" in entry:
        pytest.skip(f"needs TensorRT: {entry['skipped']}")
    manifest = json.loads((finished / f"{entry['engine']}.json").read_text())
    assert len(manifest["options"]["profiles"]) == 2
    assert (entry["int8_layers"], entry["weighted_layers"], entry["profiles"]) == (15, 17, 2)
    assert [each["requantized"] for each in entry["concatenations"]] == [0, 0]
    assert not entry["reused"]
    trained = (finished / "seed0" / "float" / "best.pt").stat().st_mtime
    again = script(finished)
    assert again.returncode == 0, again.stderr[-2000:]
    assert json.loads((finished / "results.json").read_text())["tensorrt"]["reused"]
    assert (finished / "seed0" / "float" / "best.pt").stat().st_mtime == trained


def test_errors_are_one_line(tmp_path: Path) -> None:
    run = script(tmp_path / "x", "--data-dir", "/nowhere", "--seeds=[0]")
    assert run.returncode == 2
    assert run.stderr.strip().splitlines()[-1].startswith("error: data.dir: the folder /nowhere/images does not exist")
    run = script(tmp_path / "x", "--data.patchess=64")
    assert "unknown configuration key 'data.patchess'. Did you mean 'data.patch" in run.stderr


@pytest.mark.parametrize(("option", "trains"), [("--model.weights=imagenet", True), ("--model.checkpoint=x.pt", False)])
def test_an_encoder_with_weights_is_trained_a_checkpoint_is_not(option, trains, tmp_path, monkeypatch) -> None:
    args = [SMALL[0], option, f"--output_dir={tmp_path}"]
    config, _ = parse_segmentation(build_parser("test", SegmentationConfig), args)
    run = Segmentation(config.for_seed(0))
    trained: list[nn.Module] = []
    monkeypatch.setattr(run, "build", lambda: nn.Conv2d(config.data.channels, config.outputs, 1))
    monkeypatch.setattr(run, "_train", lambda model, *_: trained.append(model))
    model = run.float_model()
    assert trained == ([model] if trains else [])
