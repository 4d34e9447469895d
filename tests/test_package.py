import subprocess
import sys
from pathlib import Path

import pytest

import qat
from qat.files import atomic_write, write_json
from qat.report import environment, format_table, plot_accuracies

ROOT = Path(__file__).parents[1]


def test_import_is_light_and_leaves_the_gpu_alone() -> None:
    code = (
        "import sys, torch, qat; assert not torch.cuda.is_initialized(); "
        "heavy = {'tensorrt', 'tensorrt_rtx', 'onnx', 'onnxruntime', 'accelerate', 'matplotlib', 'recipes'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


def test_the_library_imports_neither_recipes_nor_scripts() -> None:
    for path in (ROOT / "qat").rglob("*.py"):
        text = path.read_text()
        assert "import recipes" not in text, path
        assert "from recipes" not in text, path
        if "tensorrt" not in path.parts:
            assert "import tensorrt" not in text, path


def test_public_names_exist() -> None:
    for name in qat.__all__:
        assert getattr(qat, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = qat.nothing


def test_atomic_write_keeps_the_old_file_on_an_error(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("killed")
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert path.read_text().startswith('{\n  "a": 1')


def test_report_pieces(tmp_path: Path) -> None:
    values = environment()
    assert values["packages"]["torch"]
    assert values["cores"] >= 1
    table = format_table("t", ("name", "value"), [["[a]", "1.0"]])
    assert "[a]" in table
    history = [{"epoch": 0, "metrics": {"top1": 90.0}}, {"epoch": 1, "metrics": {"top1": 91.0}}]
    plot_accuracies(tmp_path / "a.png", [("float", 91.0, 0.0), ("QAT", 90.5, 0.1)], history, "x")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
