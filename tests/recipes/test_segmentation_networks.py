"""Where the quantizers of segmentation networks go, and what the real RTX builder makes of the file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.errors import ConfigError, EngineError
from qat.onnx.lint import lint
from qat.tensorrt import (
    BuildOptions,
    Inspection,
    OnnxGraph,
    build_engine,
    concatenations,
    inspect_layers,
    load_library,
)
from qat.tensorrt.api import Library
from recipes.segmentation import DYNAMIC_SHAPES
from recipes.segmentation_config import InferenceConfig, MaskDataConfig, NetworkConfig, SegmentationConfig
from recipes.segmentation_deployment import make_profiles
from recipes.segmentation_models import build_network

pytest.importorskip("segmentation_models_pytorch", reason="needs segmentation-models-pytorch: 'qat[segmentation]'")

SMALL: dict[str, object] = {"encoder_depth": 3, "decoder_channels": [64, 32, 32]}
X = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


class Transposed(nn.Module):
    """The U-Net of Ronneberger et al. (2015), which enlarges by transposed convolutions, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(16, 32), self.block(32, 64)
        self.stem, self.pool, self.up = self.block(3, 16), nn.MaxPool2d(2), nn.ConvTranspose2d(64, 32, 2, 2)
        self.after, self.head = self.block(64, 32), nn.Conv2d(32, 2, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(self.pool(self.stem(x)))
        return self.head(self.after(torch.cat([skip, self.up(self.down2(self.pool(skip)))], dim=1)))


def network(name: str, outputs: int = 2) -> nn.Module:
    """A network in evaluation mode; BatchNorm has the statistics of X, as activations vanish without."""
    options = dict(SMALL, **({"decoder_interpolation": "bilinear"} if name == "bilinear" else {}))
    torch.manual_seed(0)
    if name == "transposed":
        model: nn.Module = Transposed()
    elif name in ("unet", "bilinear"):
        model = build_network(NetworkConfig("unet", "resnet18", options=options), 3, outputs)
    else:
        model = build_network(NetworkConfig(name, "resnet18"), 3, outputs)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(X)
    return model.eval()


def quantizer(model: nn.Module, layer: str) -> object:
    return model.get_submodule(layer)._input_quantizer


def test_a_skip_and_what_it_joins_have_one_scale() -> None:
    """Kind: concat scales differ (TensorRT#3861, #4366): one quantizer for skip, upsampled map and concatenation."""
    model = qat.prepare(network("unet"), X)
    for block, encoder in (("0", "encoder.layer2.0"), ("1", "encoder.layer1.0")):
        shared = quantizer(model, f"decoder.blocks.{block}.conv1.0")
        reader = {"0": "encoder.layer2.0.conv1", "1": "encoder.layer1.0.conv1"}[block]
        assert shared is quantizer(model, reader), encoder
    assert quantizer(model, "decoder.blocks.0.conv1.0") is not quantizer(model, "decoder.blocks.1.conv1.0")


@pytest.mark.parametrize("outputs", [2, 21])
def test_the_head_is_float_however_many_classes_it_has(outputs: int) -> None:
    model = qat.prepare(network("unet", outputs), X)
    assert "segmentation_head.0" in qat.summary(model).left_float
    kept = qat.prepare(network("unet", 21), X, keep_float_logits=False)
    assert "segmentation_head.0" not in qat.summary(kept).left_float


def test_a_transposed_convolution_has_one_scale() -> None:
    """Kind: ConvTranspose axis (TensorRT#1694, #2380)."""
    model = qat.prepare(network("transposed"), X)
    assert model.up._weight_quantizer.descriptor.axis is None
    assert model.after[0]._input_quantizer.descriptor.axis is None


@pytest.mark.parametrize("name", ["deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"])
def test_torchvision_networks_return_their_logits_alone(name: str) -> None:
    model = build_network(NetworkConfig(name), 3, 5).eval()
    with torch.no_grad():
        before = model(X)
        assert before.shape == (2, 5, 64, 96)
        qat.set_quantizer_state(qat.prepare(model, X), qat.QuantizerState.PASSTHROUGH)
        assert torch.equal(model(X), before)
    assert any(name.startswith("model.classifier") for name in qat.summary(model).left_float)


def test_what_is_unknown_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'unett' is not a segmentation network. Did you mean 'unet'"):
        build_network(NetworkConfig("unett"), 3, 1)
    with pytest.raises(ConfigError, match=r"model.encoder='resnet17'"):
        build_network(NetworkConfig("unet", "resnet17"), 3, 1)
    with pytest.raises(ConfigError, match=r"no option 'decoder_channel'. Did you mean 'decoder_channels'"):
        build_network(NetworkConfig("unet", "resnet18", options={"decoder_channel": 1}), 3, 1)
    with pytest.raises(ConfigError, match=r"encoder_depth.*do not suit unet: Model depth is 3"):
        build_network(NetworkConfig("unet", "resnet18", options={"encoder_depth": 3}), 3, 1)
    with pytest.raises(ConfigError, match=r"fcn_resnet50 takes 3"):
        build_network(NetworkConfig("fcn_resnet50"), 1, 1)


@pytest.fixture(scope="module")
def rtx() -> Library:
    try:
        return load_library("tensorrt_rtx")
    except EngineError as error:
        pytest.skip(f"needs tensorrt_rtx: {error}")


def built(model: nn.Module, path: Path, library: Library) -> Inspection:
    """Quantize, calibrate, export with batch, height and width open, and build with the recipe's two profiles."""
    qat.prepare(model, X)
    qat.calibrate(model, [X], progress=False)
    report = qat.export(model, (X,), path, dynamic_shapes=DYNAMIC_SHAPES)
    assert report.parity is not None and report.parity.passed
    graph = OnnxGraph.load(path)
    config = SegmentationConfig(data=MaskDataConfig(), inference=InferenceConfig(tile=64, batch=4, whole=256))
    options = BuildOptions(make_profiles(config, graph.inputs[0]), compute_capabilities=("8.9",))
    inspection = inspect_layers(build_engine(path, options, library=library).layers, graph)
    assert {layer.profile for layer in inspection.layers} == {0, 1}
    return inspection


@pytest.mark.parametrize("name", ["unet", "bilinear"])
def test_unet_runs_in_int8_and_nothing_is_requantized_at_the_concats(name: str, tmp_path: Path, rtx: Library) -> None:
    inspection = built(network(name), tmp_path / "m.onnx", rtx)
    assert [op.module for op in inspection.float_operations] == ["encoder.bn1", "segmentation_head.0"], "stem and head"
    assert len(inspection.int8_operations) == 15
    findings = {finding.rule for finding in lint(tmp_path / "m.onnx").findings}
    assert not findings & {"concat-scales", "requantize"}
    joined = concatenations(inspection.layers, OnnxGraph.load(tmp_path / "m.onnx"))
    assert [(each.branches, each.already_int8, each.requantized) for each in joined] == [(2, 1, 0)] * 2
    for profile in (0, 1):
        alone = [layer.onnx_nodes for layer in inspection.standalone_qdq if layer.profile == profile]
        assert alone == [("encoder.layer1.0.conv1._input_quantizer/QuantizeLinear",)], "behind the float stem only"


def test_one_file_is_what_torch_computes_at_sizes_it_was_not_exported_with(tmp_path: Path) -> None:
    model, path = network("unet"), tmp_path / "m.onnx"
    qat.prepare(model, X)
    qat.calibrate(model, [X], progress=False)
    qat.export(model, (X,), path, dynamic_shapes=DYNAMIC_SHAPES)
    generator = torch.Generator().manual_seed(1)
    for shape in ((1, 3, 32, 32), (3, 3, 160, 96), (1, 3, 128, 192)):
        report = qat.check_parity(model, path, [torch.randn(shape, generator=generator)], per_layer=True)
        assert report.passed and len(report.layers) > 20 and not report.unmatched
        assert sum(row.mismatched for row in report.layers) == 0


def test_a_transposed_convolution_builds_with_open_sizes(tmp_path: Path, rtx: Library) -> None:
    inspection = built(network("transposed"), tmp_path / "m.onnx", rtx)
    found = {op.module: op.precision for op in inspection.operations}
    assert found["after.0"] == "int8" and found["head"] == "fp32"
    assert found["up"] == "fp32", "RTX 1.7 has no INT8 kernel for it; if this fails, that has changed"
