"""What TensorRT makes of a prepared model: built for real with tensorrt-rtx, which needs no GPU for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement_networks as net
import qat
from placement_validator import calibrated
from qat.placement import prepare

pytest.importorskip("tensorrt_rtx", reason="builds an engine; install qat[tensorrt-rtx]")

X = net.image(size=32)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return x + self.attention(x, x, x, need_weights=False)[0]


def layers(model: nn.Module, x: Any, folder: Path) -> Any:
    from qat.tensorrt import BuildOptions, build_engine, load_library

    calibrated(prepare(model, x), (x,))
    qat.export(model, x, folder / "model.onnx", dynamic_batch=False)
    options = BuildOptions(compute_capabilities=("8.9",))
    return build_engine(folder / "model.onnx", options, library=load_library("tensorrt_rtx")).layers


@pytest.mark.parametrize(
    ("build", "x", "products"),
    [
        (net.Basic, X, 2),
        (net.Downsample, X, 3),
        (net.Inverted, X, 6),
        (net.DenseNet, X, 5),
        (net.Inception, X, 5),
        (net.Padded, X, 3),
        (lambda: net.ViTBlock(fused=True), torch.randn(2, 32, 32), 4),
        (Attention, torch.randn(2, 32, 64), 2),
    ],
    ids=["basic", "downsample", "inverted", "densenet", "inception", "padded", "vit", "multihead"],
)
def test_all_products_run_in_int8(build: Any, x: Any, products: int, tmp_path: Path) -> None:
    """Kind: residual add requantized (TensorRT#3197), concat scales (#3861): nothing stands alone between kernels."""
    built = layers(build(), x, tmp_path)
    weighted = [layer for layer in built if layer.kind in ("correlation", "gemm", "deconv", "runtime_fusion")]
    assert [layer.precision for layer in weighted] == ["int8"] * products
    for pool in (layer for layer in built if "pool" in layer.kind):
        assert pool.precision == "int8"
    # A kernel that only requantizes: INT8 in, INT8 out, and no operator of the model in it.
    for layer in built:
        types = {tensor.dtype for tensor in (*layer.inputs, *layer.outputs)}
        only_scales = all("Linear" in node for node in layer.onnx_nodes)
        assert not (types == {"int8"} and only_scales and layer.onnx_nodes)


def test_attention_is_one_fused_int8_kernel(tmp_path: Path) -> None:
    built = layers(Attention(), torch.randn(2, 32, 64), tmp_path)
    fused = [layer for layer in built if "mha" in layer.name]
    assert len(fused) == 1
    assert {tensor.dtype for tensor in fused[0].inputs} == {"int8"}


def test_identity_is_read_in_int8(tmp_path: Path) -> None:
    built = layers(net.Basic(), X, tmp_path)
    add = next(layer for layer in built if any(node.endswith("/Add") for node in layer.onnx_nodes))
    assert "int8" in {tensor.dtype for tensor in add.inputs}
