"""docs/question_answering.ipynb, cell by cell, as a reader would run it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "question_answering.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells), "outputs are kept out of the repository"
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
    printed = capsys.readouterr().out
    assert names["float_metrics"]["f1"] > 60, "the float model learned nothing, so nothing was shown"
    assert names["tuned_metrics"]["f1"] > names["float_metrics"]["f1"] - 10
    assert names["onnx_metrics"]["f1"] == pytest.approx(names["tuned_metrics"]["f1"], abs=1)
    assert names["answer"].text == "1850"
    assert "codes that differ from torch: 0" in printed and "TensorRT: " in printed
