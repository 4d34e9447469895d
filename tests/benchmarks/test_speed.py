"""The speed benchmarks run in their quick mode on a CPU, and their correctness gates can fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import calibration
import compiled_ways
import fake_quant_kernels
import import_and_export
import qat_step
import timing
from qat.errors import QatError
from qat.fake_quant import fake_quantize
from qat_step_networks import NETWORKS

CPU = torch.device("cpu")


def run(benchmark: Any, folder: Path, *more: str) -> dict[str, Any]:
    """A quick run's results; the picture must be there too."""
    files = ["--results", str(folder / "r.json"), "--plot", str(folder / "p.png")]
    benchmark.main(["--quick", "--device", "cpu", *files, *more])
    assert (folder / "p.png").stat().st_size > 5000
    found: dict[str, Any] = json.loads((folder / "r.json").read_text())
    assert found["environment"]["packages"]["torch"] and found["quick"]
    return found


def test_steps_are_compared_with_the_float_step_of_the_same_run(tmp_path: Path) -> None:
    chosen = ["--networks", "bert", "--variants", "float", "ours", "Model Optimizer"]
    rows = {row["variant"]: row for row in run(qat_step, tmp_path, *chosen)["rows"]}
    assert rows["ours"]["x float"] == pytest.approx(rows["ours"]["ms"] / rows["ours"]["float ms"], abs=1e-3)
    assert rows["float"]["x float"] == 1
    assert (rows["float"]["quantizers"], rows["ours"]["quantizers"]) == (0, 22)
    assert "ms" in rows["Model Optimizer"] or "modelopt" in rows["Model Optimizer"]["missing"]
    again = run(qat_step, tmp_path, *chosen[:2], "--variants", "torch fake_quantize")
    assert {row["variant"] for row in again["rows"]} == {*rows, "torch fake_quantize"}


def test_ways_to_compile_take_turns(tmp_path: Path) -> None:
    chosen = ["--networks", "bert", "--ways", "float", "ours, masks saved", "--backend", "aot_eager"]
    base, ours = run(compiled_ways, tmp_path, *chosen)["rows"]
    assert ours["x float"] == pytest.approx(ours["ms"] / base["ms"], abs=1e-3)
    assert base["repeats"] == compiled_ways.STEPS and ours["host ms"] > 0
    assert (ours["graph breaks"], ours["graphs"]) == (0, 1)


def test_every_layer_of_the_networks_is_quantized() -> None:
    from qat.nn.base import QuantMixin

    network = NETWORKS["efficientnet_b0"](True)
    model, _ = qat_step.VARIANTS["ours"](network, CPU)
    weighted = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weighted) == 82 and all(isinstance(m, QuantMixin) for m in weighted)


def test_kernels_calibration_and_imports(tmp_path: Path) -> None:
    kernels = run(fake_quant_kernels, tmp_path)["rows"]
    assert {row["elements"] for row in kernels} == {2**10, 2**15} and all(row["ms"] > 0 for row in kernels)
    searches = {row["what"]: row["seconds"] for row in run(calibration, tmp_path)["rows"]}
    parts = [searches[f"search: {method}"] for method in calibration.METHODS]
    assert searches["searches together"] == pytest.approx(sum(parts), abs=1e-3)
    row = import_and_export.import_row(1)
    assert 0 < row["seconds"] < row["torch seconds"]


def test_gates_catch_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing.check_fake_quantize(CPU) == calibrated_values()
    with pytest.raises(QatError, match="differs from float64"):
        timing.check_fake_quantize(CPU, lambda x, amax, *rest: fake_quantize(x, amax * 1.0001, *rest))
    assert calibration.check(CPU) == 9
    monkeypatch.setattr("qat.calib.histogram.mse_bin", lambda counts, bound, device: counts.numel())
    with pytest.raises(QatError, match="mse on normal"):
        calibration.check(CPU)


def calibrated_values() -> int:
    """Values of the gate: three types, three kinds of scale, two shapes."""
    return 3 * 3 * (3 * 16 * 9 * 7 + 2 * 8 * 33 * 5)


def test_median_and_quartiles() -> None:
    found = timing.median_ms(lambda: None, CPU, repeats=5, warmup=1)
    assert found["quartiles_ms"][0] <= found["ms"] <= found["quartiles_ms"][1]
    assert timing.peak_mib(lambda: None, CPU) is None and timing.gpu_ms(lambda: None, CPU) is None


def test_alternating_calls_take_turns() -> None:
    calls: list[str] = []
    first, second = timing.alternating_ms([lambda: calls.append("a"), lambda: time.sleep(0.01)], CPU, 3, warmup=0)
    assert calls == ["a"] * 3 and second["ms"] > first["ms"] and second["repeats"] == 3
