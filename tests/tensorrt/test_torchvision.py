"""ResNet-50 and EfficientNet-B0 through the real RTX builder: Q/DQ, FP16 and FP32, with two profiles."""

import dataclasses

import pytest
import torch
import torchvision

import qat
from qat.tensorrt.inspection import inspect_layers
from qat.tensorrt.onnx_graph import OnnxGraph
from qat.tensorrt.profiles import ShapeRange
from qat.tensorrt.store import build_or_reuse

pytestmark = pytest.mark.slow
SHAPE = (3, 224, 224)
OPERATIONS = {"resnet50": 54, "efficientnet_b0": 82}


def _model(name: str) -> torch.nn.Module:
    model = getattr(torchvision.models, name)()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    # An untrained network's activations vanish; one training step's statistics keep them near 1.
    with torch.no_grad():
        model.train()(torch.randn(2, *SHAPE))
    return model.eval()


def _export(name: str, kind: str, path) -> None:
    model, x = _model(name), torch.randn(2, *SHAPE)
    if kind == "qdq":
        qat.quantize_(model)
        qat.calibrate(model, [x], method="max")
        qat.export(model, x, path, verify=False, input_names=["input"])
        return
    dtype = torch.float16 if kind == "fp16" else torch.float32
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.onnx.export(
        model.to(dtype), (x.to(dtype),), dynamo=True, input_names=["input"], dynamic_shapes=shapes, verbose=False
    )
    assert program is not None
    program.save(str(path))


@pytest.mark.parametrize("kind", ["qdq", "fp16", "fp32"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_builds_with_two_profiles(name, kind, tmp_path, options, rtx) -> None:
    path, engine = tmp_path / "model.onnx", tmp_path / "model.engine"
    _export(name, kind, path)
    profiles = [{"input": ShapeRange(*((batch, *SHAPE) for batch in batches))} for batches in ((1, 1, 1), (1, 8, 16))]
    wanted = dataclasses.replace(options, profiles=tuple(profiles))
    stored = build_or_reuse(path, engine, wanted, library=rtx)
    inspection = inspect_layers(stored.layers, OnnxGraph.load(path))
    assert {layer.profile for layer in stored.layers} == {0, 1}
    assert len(inspection.operations) == OPERATIONS[name]
    assert not [op.node for op in inspection.operations if op.precision == "not found"]
    if kind == "qdq":
        inspection.require_int8(100)
    else:
        assert {op.precision for op in inspection.operations} == {kind}
    assert build_or_reuse(path, engine, wanted, library=rtx).reused
