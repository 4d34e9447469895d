"""scripts/sensitivity.py and scripts/report.py on a small network and real digits."""

import copy
import io
import json
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import qat
from qat.quantizer import named_quantizers
from qat.sensitivity import Point, Unit
from recipes.classification import Classification
from recipes.config import RunConfig, build_parser, parse
from recipes.mixed import build_without, engine_points, mixed_config, spread, without, write_config
from recipes.models import build_model

ROOT = Path(__file__).parents[2]
SMALL = [
    "--model.name=shufflenet_v2_x0_5",
    "--data.image_size=32",
    "--data.batch_size=128",
    "--float_train.epochs=5",
    "--float_train.lr=0.004",
    "--qat.epochs=1",
    "--quant.batches=2",
    "--quant.calibrator=max",
    "--quant.per_channel=false",
    "--tensorrt.build=never",
    "--export.threshold=20",
]


def script(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script in this process, which has imported torch already."""
    path, out, err = str(ROOT / "scripts" / name), io.StringIO(), io.StringIO()
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [path, *args], [str(ROOT / "scripts")]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit_:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    return subprocess.CompletedProcess(sys.argv, int(exit_.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sensitivity") / "run"
    run = script("qat_finetune.py", *SMALL, f"--output_dir={folder}")
    assert run.returncode == 0, run.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_sensitivity_then_a_mixed_run_then_the_report(finished: Path) -> None:
    options = [*SMALL, f"--output_dir={finished}", "--metric=sqnr_db", "--level=block", "--drop=0"]
    found = script("sensitivity.py", *options)
    assert found.returncode in (0, 1), found.stderr[-2000:]
    calibrated = (finished / "sensitivity" / "model.pt").stat().st_mtime_ns
    kept = [finished / "sensitivity" / name for name in ("scores.json", "configurations.json")]
    written = [path.stat().st_mtime_ns for path in kept]
    again = script("sensitivity.py", *options)
    assert again.stdout == found.stdout
    assert (finished / "sensitivity" / "model.pt").stat().st_mtime_ns == calibrated
    assert [path.stat().st_mtime_ns for path in kept] == written, "nothing is evaluated twice"
    results = json.loads((finished / "sensitivity" / "sensitivity.json").read_text())
    proposal = results["proposal"]
    assert proposal["reached"], "with everything float it is float"
    assert proposal["metrics"]["top1"] >= results["float_top1"]
    assert results["ranking"]["level"] == "block"
    assert any(len(row["members"]) > 2 for row in results["ranking"]["rows"])
    assert results["pareto"][0]["coverage"] == pytest.approx(sum(results["shares"].values()))
    for name in ("sensitivity.png", "pareto.png"):
        assert (finished / "sensitivity" / name).stat().st_size > 5000

    config = finished / "sensitivity" / "proposed.yaml"
    assert yaml.safe_load(config.read_text())["quant"]["exclude"] == proposal["float"]
    mixed = script("calibrate.py", "--config", str(config))
    assert mixed.returncode == 0, mixed.stderr[-2000:]
    checked = json.loads((finished.with_name("run_mixed") / "ptq" / "results.json").read_text())
    assert checked["float"]["top1"] == pytest.approx(results["float_top1"]), "the float model is taken over"
    assert checked["ptq"][0]["metrics"]["top1"] == pytest.approx(proposal["checked"]["top1"])
    assert proposal["metrics"]["top1"] == pytest.approx(proposal["checked"]["top1"]), "the steps are of configurations"
    assert mixed.stdout.count("excluded by") >= len(proposal["float"]) > 0

    reported = script("report.py", str(finished))
    assert reported.returncode == 0, reported.stderr[-2000:]
    page = (finished / "report.html").read_text()
    for text in ("Accuracy", "QAT seed 0", "Noise by layer", "Histograms", "Quantizers", "Sensitivity", "shufflenet"):
        assert text in page
    assert proposal["float"][0] in page
    assert "excluded" not in page, "it is about the run, not about the proposal"


def test_the_report_without_a_model_or_an_analysis(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    folder.mkdir()
    for name in ("results.json", "config.yaml"):
        (folder / name).write_bytes((finished / name).read_bytes())
    reported = script("report.py", str(folder), "--output", str(tmp_path / "page.html"))
    assert reported.returncode == 0, reported.stderr[-2000:]
    page = (tmp_path / "page.html").read_text()
    assert "There is no calibrated or fine-tuned checkpoint in this folder." in page
    assert "scripts/sensitivity.py does it." in page
    assert "The float model was not trained in this folder." in page
    nothing = script("report.py", str(tmp_path))
    assert nothing.returncode == 2
    assert nothing.stderr.strip().startswith("error: no RUN_FOLDER with a results.json was given")


def small_config(tmp_path: Path, *more: str) -> RunConfig:
    args = [*SMALL, f"--output_dir={tmp_path / 'run'}", "--float_train.epochs=1", "--quant.placement=modules", *more]
    return parse(build_parser(""), args)[0]


def test_a_config_leaves_exactly_the_named_layers(tmp_path: Path) -> None:
    config = small_config(tmp_path, "--quant.exclude=[fc]")
    names = ["stage2.1.branch2.0", "stage3.[x]"]
    write_config(mixed_config(config, names), tmp_path / "a.yaml", "A test.")
    again = parse(build_parser(""), ["--config", str(tmp_path / "a.yaml")])[0]
    assert again.quant.exclude == ("fc", "stage2.1.branch2.0", "stage3.[[]x]")
    assert again.model.checkpoint == str(tmp_path / "run" / "float" / "best.pt")
    assert again.output_dir == tmp_path / "run_mixed"
    assert replace(again, output_dir=config.output_dir, model=config.model, quant=config.quant) == config
    given = mixed_config(replace(config, model=replace(config.model, checkpoint="x.pt")), [])
    assert given.model.checkpoint == "x.pt"


def test_points_are_spread_over_the_front() -> None:
    units = [Unit((str(n),), ()) for n in range(10)]
    points = [Point((unit,), 100.0 - n, 50.0 + n, n != 3) for n, unit in enumerate(units)]
    chosen = [point.units[0].name for point in spread(points, 3)]
    assert chosen == ["0", "5", "9"]
    assert len(spread(points, 20)) == 9
    assert [point.units[0].name for point in spread(points, 1)] == ["0"]


@pytest.mark.slow
def test_engines_of_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    config = small_config(tmp_path, "--tensorrt.build=always", "--tensorrt.library=tensorrt_rtx")
    run = Classification(config)
    torch.manual_seed(0)
    never = copy.copy(run)
    never.config = replace(config, tensorrt=replace(config.tensorrt, build="never"))
    model = run.float_model()
    assert engine_points(never, model, [], tmp_path) == {"skipped": "tensorrt.build is 'never'"}
    run.quantize(model)
    run.calibrate(model)
    name = "stage2.1.branch2.0"
    choices = [Point((), 90.0, 80.0, True), Point((Unit((name,), ()),), 85.0, 81.0, True)]
    found: dict[str, Any] = engine_points(run, model, choices, tmp_path / "engines")
    first, second = found["points"]
    assert (first["float"], second["float"]) == ([], [name])
    assert first["engine"]["int8_layers"] == second["engine"]["int8_layers"] + 1
    if first["engine"]["not_executed"]:
        assert first["latency_ms"] is None
    else:
        assert first["latency_ms"] > 0


def test_a_model_placed_anew_keeps_weights_and_amax(tmp_path: Path) -> None:
    run = Classification(small_config(tmp_path, "--model.name=resnet18", "--quant.placement=traced"))
    torch.manual_seed(0)
    model = build_model(run.config.model, 10)
    run.quantize(model)
    run.calibrate(model)
    # Without INT8 in front of it the add of layer1.0 is float, and conv1 keeps the quantizer that they shared.
    built = build_without(run, ["layer1.0.conv2"], model)
    kept, state = model.state_dict(), built.state_dict()
    assert not [key for key in state if key.startswith("layer1.0.conv2._") or "layer1.0._add" in key]
    assert all(torch.equal(value, kept[key]) for key, value in state.items() if key in kept)
    # The add of layer2.0 is fused with the other branch now, so its quantizer has another tensor.
    name = "layer2.0._add_quantizer"
    other = build_without(run, ["layer2.0.conv2"], model)
    described = [next(row for row in qat.summary(m).quantizers if row.name == name).tensors for m in (model, other)]
    assert described[0] != described[1]
    assert not torch.equal(other.state_dict()[f"{name}._amax"], kept[f"{name}._amax"])
    assert all(q.calibrated for _, q in named_quantizers(other))


def test_the_layers_of_a_unit_are_those_that_exclusion_leaves_float(tmp_path: Path) -> None:
    run = Classification(small_config(tmp_path, "--quant.placement=traced"))
    model = run.float_model()
    other = copy.deepcopy(model)
    run.quantize(model)
    names = {name for name, _ in named_quantizers(model)}
    without(run, ["stage2.1.branch2.0"]).quantize(other)
    assert names - {name for name, _ in named_quantizers(other)} == {
        "stage2.1.branch2.0._input_quantizer",
        "stage2.1.branch2.0._weight_quantizer",
    }
