"""Real networks, and NVIDIA's own parser and builder on what we write."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torchvision
from onnx_models import Residual, Tokens, Upsample, calibrated, inputs_for
from torch import nn

from qat.convert import quantize_
from qat.onnx import export

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx: pip install tensorrt-rtx"
)


@pytest.mark.parametrize(("name", "layers"), [("resnet18", 21), ("efficientnet_b0", 82)])
def test_torchvision(tmp_path: Path, name: str, layers: int) -> None:
    model = torchvision.models.get_model(name, num_classes=10)
    quantize_(model)
    x = torch.randn(2, 3, 64, 64)
    calibrated(model, x)
    report = export(model, x, tmp_path / "m.onnx")
    assert len(report.quantized) == 2 * layers and not report.unused
    assert report.parity is not None and report.parity.passed and not report.parity.unmatched
    assert report.size < 1.25 * sum(p.numel() for p in model.parameters())


def _int8(path: Path, x: torch.Tensor, name: str) -> dict[str, str]:
    from qat.tensorrt import BuildOptions, OnnxGraph, ShapeRange, build_engine, inspect_layers, load_library

    shape = tuple(x.shape)
    options = BuildOptions(
        profiles=({name: ShapeRange((1, *shape[1:]), shape, (8, *shape[1:]))},), compute_capabilities=("8.9",)
    )
    result = build_engine(path, options, library=load_library("tensorrt_rtx"))
    operations = inspect_layers(result.layers, OnnxGraph.load(path)).operations
    return {operation.node: operation.precision for operation in operations}


@needs_rtx
@pytest.mark.parametrize("opset", [13, 21])
def test_rtx_builds_convolutions_in_int8(tmp_path: Path, opset: int) -> None:
    model = nn.Sequential(Residual(), nn.Identity())
    x = torch.randn(8, 3, 32, 32)
    report = export(calibrated(model, x), x, tmp_path / "m.onnx", opset=opset, verify=False)
    precisions = _int8(report.path, x, report.input_names[0])
    assert precisions["0.stem/Conv"] == precisions["0.depthwise/Conv"] == "int8"


@needs_rtx
@pytest.mark.parametrize("shape", [(8, 64), (8, 16, 64)])
def test_rtx_builds_linear_in_int8(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    quantize_(model)
    x = torch.randn(shape)
    report = export(calibrated(model, x), x, tmp_path / "m.onnx")
    assert set(_int8(report.path, x, report.input_names[0]).values()) == {"int8"}


@needs_rtx
@pytest.mark.parametrize("model_class", [Tokens, Upsample])
def test_rtx_takes_the_other_models(tmp_path: Path, model_class: type[nn.Module]) -> None:
    model = calibrated(model_class())
    x = inputs_for(model, 8)
    report = export(model, x, tmp_path / "m.onnx", verify=False)
    assert _int8(report.path, x, report.input_names[0])
