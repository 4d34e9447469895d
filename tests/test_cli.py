"""The console command `qat`, in this process; .ci/wheel runs it from an installed wheel."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from onnx import load
from torch import Tensor, nn

import qat
from qat.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]


class Net(nn.Module):
    """Two convolutions around a residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + x)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


MODULE = Path(__file__).stem


def make() -> nn.Module:
    return Net()


def not_a_model() -> str:
    return "text"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model, x = Net().eval(), torch.randn(4, 3, 8, 8)
    qat.prepare(model, x)
    qat.calibrate(model, [x], progress=False)
    path = tmp_path / "qat.pt"
    torch.save({"model": model.state_dict()}, path)
    return path


def _export(checkpoint: Path, *more: str) -> int:
    output = checkpoint.with_name("model.onnx")
    command = ["export", "--torch", f"{MODULE}:make", "--shapes", "image:2x3x8x8", "--output", str(output)]
    return main([*command, "--checkpoint", str(checkpoint), *more])


def test_export_lint_build_inspect_benchmark_in_a_row(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, engine, report = tmp_path / "model.onnx", tmp_path / "model.engine", tmp_path / "report.json"
    assert _export(checkpoint, "--precision", "fp16") == 0
    assert "opset 21" in capsys.readouterr().out
    assert load(path).graph.input[0].name == "image"
    assert main(["lint", str(path), "--json", "--severity", "error"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path)
    assert main(["benchmark", "--onnx", str(path), "--shapes", "image:2x3x8x8", "--iterations", "2", "--warmUp", "0",
                 "--json", str(report)]) == 0  # fmt: skip
    assert json.loads(report.read_text())["models"][0]["model"] == "model.onnx"
    pytest.importorskip("tensorrt_rtx")
    shapes = ["--minShapes", "image:1x3x8x8", "--optShapes", "image:2x3x8x8", "--maxShapes", "image:4x3x8x8"]
    build = ["build", "--onnx", str(path), "--saveEngine", str(engine), "--computeCapabilities", "8.9", "--quiet"]
    assert main([*build, *shapes, "--library", "tensorrt_rtx"]) == 0
    capsys.readouterr()
    assert main(["inspect", "--engine", str(engine), "--onnx", str(path)]) == 0
    assert "INT8:" in capsys.readouterr().out


def test_export_options(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _export(checkpoint, "--opset", "18", "--fixed-batch", "--float-weights") == 0
    proto = load(tmp_path / "model.onnx")
    assert proto.opset_import[0].version == 18
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    assert _export(checkpoint, "--placement", "modules") == 2
    assert "does not fit Net" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "--torch", f"{MODULE}:nothing", "--shapes", "x:1x3", "--output", "x.onnx"], "cannot be made"),
        (["export", "--torch", f"{MODULE}:not_a_model", "--shapes", "x:1x3", "--output", "x.onnx"], "returned str"),
        (["export", "--torch", f"{MODULE}:make", "--shapes", "x=1", "--output", "x.onnx"], "Cannot read the shape"),
        (["lint", "absent.onnx"], "absent.onnx"),
    ],
)
def test_errors_are_one_sentence_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "Traceback" not in error


def test_an_uncalibrated_model_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.onnx"
    assert main(["export", "--torch", f"{MODULE}:make", "--shapes", "x:1x3x8x8", "--output", str(output)]) == 2
    assert "calibrat" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_under_its_own_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"usage: qat {command}" in capsys.readouterr().out


def test_help_lists_the_commands_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert all(f"  {command}" in capsys.readouterr().out for command in list(COMMANDS)[:1])
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert qat.__version__ in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["train"])


def test_the_wheel_has_the_command_and_its_types() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"qat": "qat.cli:main"}
    assert project["tool"]["setuptools"]["package-data"]["qat"] == ["py.typed"]
    assert (ROOT / "qat/py.typed").is_file()
