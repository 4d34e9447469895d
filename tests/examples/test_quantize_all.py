"""Kind: a model from a stranger. Five networks that know nothing of qat go from float to a Q/DQ file, unchanged."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "yolo_detector": (96, {"stem.0.conv", "detect.heads.0", "detect.heads.1", "detect.heads.2"}),
    "super_resolution": (28, {"head", "tail"}),
    "audio_tcn": (34, {"front.0", "head"}),
    "pointnet": (33, {"matmul", "input_transform.mlp.0", "input_transform.fc3", "mlp1.0", "classifier.7"}),
    "lstm_tagger": (8, {"tag"}),
}
"""The count of quantizers, and the layers that stay float beside concats."""


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "tests" / "fuzz"))
    return importlib.import_module("quantize_all")


@pytest.mark.parametrize("name", list(EXPECTED))
def test_from_float_to_a_clean_file_and_an_int8_engine(name: str, examples: Any) -> None:
    with importlib.import_module("fuzz_cases").cached_translations():
        row = examples.quantize(name, 2)
    quantizers, left_float = EXPECTED[name]
    assert row["quantizers"] == quantizers
    assert {layer for layer in row["left_float"] if "concat" not in layer} == left_float
    assert all(row["left_float"].values())
    assert row["lint_warnings"] == [] and row["parity"] and row["mismatched_codes"] == 0
    assert row["worst_layer"] < 1e-4 and row["ptq_sqnr_db"] > 0
    engine = row["rtx"]
    if engine is not None:
        assert engine["int8"] >= engine["quantized"] - examples.FIRST_STEP_ZERO.get(name, 0) > 0
        assert engine["requantized_adds"] == 0 and engine["requantized_concats"] == []


def test_a_stranger_does_not_know_qat(examples: Any) -> None:
    for name in (*examples.NETWORKS, "yolo_shapes", "fitting"):
        text = (EXAMPLES / f"{name}.py").read_text()
        assert not re.search(r"\bqat\b|quanti[sz]", text, re.IGNORECASE)
        assert len(text.splitlines()) <= 150


def test_results_are_written_and_a_failure_is_the_exit_status(
    examples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"score": "x", "float": 1.0, "ptq": 1.0, "qat": 1.0, "qat_sqnr_db": 20.0, "rtx": None, "parity": True}
    for warnings, status in (([], 0), (["a finding"], 1)):
        monkeypatch.setattr(examples, "quantize", lambda *_, w=warnings: {**row, "lint_warnings": w})
        assert examples.main(["--only", "pointnet", "--results", str(tmp_path / "r.json")]) == status
        written = json.loads((tmp_path / "r.json").read_text())
        assert written["environment"]["commit"] and list(written["networks"]) == ["pointnet"]
