"""Whole architectures of torchvision: prepared, passing through bit for bit, trained a step, exported and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import qat
from qat.placement import prepare

VIT: dict[str, Any] = {"patch_size": 32, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
MODELS: dict[str, tuple[int, dict[str, str]]] = {
    # model -> image size, and quantizer -> what must share it
    "resnet18": (64, {"layer1.1.conv1._input_quantizer": "layer1.1.add", "layer2.0._add_quantizer": "layer2.0.add"}),
    "mobilenet_v2": (64, {"features.3.conv.0.0._input_quantizer": "features.3.add"}),
    "efficientnet_b0": (64, {"features.2.1.block.0.0._input_quantizer": "features.2.1.add"}),
    "densenet121": (64, {"features.denseblock1.denselayer2._concat_quantizer": "features.denseblock1.concat"}),
    "swin_t": (64, {"features.1.0.attn._matmul_input_quantizer": "features.1.0.attn.matmul"}),
}


def build(name: str) -> nn.Module:
    model = torchvision.models.get_model(name, weights=None, num_classes=20)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_torchvision_model(name: str) -> None:
    size, sharers = MODELS[name]
    x = torch.randn(2, 3, size, size)
    model = build(name)
    keys, expected = set(model.state_dict()), model(x)
    prepare(model, x)
    readers = {row.name: row.readers for row in qat.summary(model).quantizers}
    for quantizer, reader in sharers.items():
        assert reader in readers[quantizer]
    assert keys <= set(model.state_dict())
    qat.set_quantizer_state(model, qat.QuantizerState.PASSTHROUGH)
    assert torch.equal(model(x), expected)
    qat.set_quantizer_state(model, qat.QuantizerState.QUANTIZING)
    qat.calibrate(model, [x], progress=False)
    model.train()(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_vision_transformer_with_small_patches() -> None:
    model = torchvision.models.VisionTransformer(image_size=160, num_classes=20, **VIT).eval()
    nn.init.normal_(model.heads.head.weight)
    x = torch.randn(2, 3, 160, 160)
    expected = model(x)
    prepare(model, x)
    block = "encoder.layers.encoder_layer_1."
    names = {name for name, _ in qat.named_quantizers(model)}
    assert {f"{block}_add_quantizer", f"{block}_add_quantizer_2"} <= names
    assert f"{block}self_attention._attention._softmax_quantizer" in names
    qat.set_quantizer_state(model, qat.QuantizerState.PASSTHROUGH)
    assert torch.equal(model(x), expected)


def test_every_left_float_layer_of_a_model_has_a_reason() -> None:
    model = prepare(build("efficientnet_b0"), torch.randn(1, 3, 64, 64))
    reasons = qat.summary(model).left_float
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and not hasattr(module, "_input_quantizer"):
            assert reasons[name]


@pytest.mark.parametrize("name", ["basic", "vit"])
def test_prepared_model_exports_and_matches_onnxruntime(name: str, tmp_path: Path) -> None:
    import placement_networks as net

    model, x = (net.Downsample(), net.image()) if name == "basic" else (net.ViTBlock(True), torch.randn(2, 20, 32))
    prepare(model, x)
    qat.calibrate(model, [x], progress=False)
    report = qat.export(model, x, tmp_path / "model.onnx")
    assert report.parity is not None
    assert report.parity.passed
    assert not report.parity.unmatched
    assert not report.unused
    assert set(report.quantized) == {n for n, q in qat.named_quantizers(model)}


def test_data_parallel_training_step(tmp_path: Path) -> None:
    """Shared quantizers are registered twice; DistributedDataParallel must take that."""
    from torch import distributed

    import placement_networks as net

    distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        x = net.image()
        model = prepare(net.Downsample(), x)
        qat.calibrate(model, [x], progress=False)
        for _, quantizer in qat.named_quantizers(model):
            quantizer.set_amax_mode("learned")
        wrapped = nn.parallel.DistributedDataParallel(model.train())
        wrapped(x).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        distributed.destroy_process_group()
