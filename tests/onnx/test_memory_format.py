import numpy as np
import pytest
import torch
from onnx_models import ops
from torch import nn

import qat
from qat.runtime import OnnxRuntimeRunner


@pytest.mark.parametrize("where", ["weights", "input", "error"])
def test_channels_last_exports_the_same_file(tmp_path, where) -> None:
    """torch.export turns adaptive pooling after a channels_last convolution into Range, Mul, Add and Gather."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.Flatten()).eval()
    x = torch.randn(2, 3, 8, 8)
    plain = qat.export(model, (x,), tmp_path / "plain.onnx")
    if where == "input":
        x = x.to(memory_format=torch.channels_last)
    else:
        model.to(memory_format=torch.channels_last)
    strides = [p.stride() for p in model.parameters()]
    if where == "error":
        with pytest.raises(qat.errors.ExportError):
            qat.export(model, (x[:, :2],), tmp_path / "bad.onnx")
    else:
        report = qat.export(model, (x,), tmp_path / "m.onnx")
        assert "Gather" not in ops(report.path)
        assert report.path.read_bytes() == plain.path.read_bytes()
        result = OnnxRuntimeRunner(report.path).run({report.input_names[0]: x.numpy()})
        np.testing.assert_allclose(result["output"], model(x).detach().numpy(), atol=1e-6)
    assert [p.stride() for p in model.parameters()] == strides
