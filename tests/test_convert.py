import copy

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.descriptor import QuantDescriptor
from qat.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.stem(x)).flatten(2).transpose(1, 2)
        y, _ = self.attention(y, y, y, need_weights=False)
        logits: Tensor = self.head(y.mean(1))
        return logits


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_converts_weighted_layers_and_lists_the_rest() -> None:
    net = Net().eval()
    before, parameters = net(X), list(net.parameters())
    report = qat.quantize_(net)
    assert report.converted == ("stem", "blocks.0", "blocks.2", "head")
    assert list(report.left_float) == ["attention.out_proj"]
    assert "bypassed" in report.left_float["attention.out_proj"]
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    qat.set_quantizer_state(net, qat.QuantizerState.PASSTHROUGH)
    assert torch.equal(net(X), before)
    assert net.blocks[2]._weight_quantizer.descriptor.axis is None
    assert net.stem._weight_quantizer.descriptor.axis == 0


def is_small(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.in_channels < 8


@pytest.mark.parametrize(
    ("exclude", "left", "reason"),
    [
        ("head", "head", "'head'"),
        (["blocks.*"], "blocks.0", "'blocks.*'"),
        (nn.Linear, "head", "Linear"),
        ([is_small], "stem", "is_small"),
    ],
)
def test_exclude_by_name_glob_type_and_predicate(exclude: object, left: str, reason: str) -> None:
    report = qat.quantize_(Net(), exclude=exclude)  # type: ignore[arg-type]
    assert left not in report.converted
    assert report.left_float[left] == f"excluded by {reason}"


def test_include_by_type_glob_and_pooling() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Linear(3, 3))
    assert qat.quantize_(net, include=nn.MaxPool2d).converted == ("1",)
    assert qat.quantize_(net, include="0").converted == ("0",)
    assert qat.summary(net).left_float == {"2": "not selected"}


def test_names_are_matched_exactly() -> None:
    """Kind: quantize only some layers (TensorRT#3564): a name that fits nothing is not ignored."""
    with pytest.raises(ConfigError, match=r"'haed' matches nothing in Net. Did you mean 'head'"):
        qat.quantize_(Net(), exclude="haed")
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)])
    assert qat.quantize_(net, include="1").converted == ("1",)


def test_nothing_converted_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no layer of Sequential was converted"):
        qat.quantize_(nn.Sequential(nn.ReLU()))


def test_shared_module_is_converted_once() -> None:
    shared = nn.Linear(3, 3)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    assert qat.quantize_(net).converted == ("0",)
    assert net[0] is net[2]


def test_converting_twice_changes_nothing_more() -> None:
    net = Net()
    qat.quantize_(net)
    keys = set(net.state_dict())
    report = qat.quantize_(net)
    assert report.converted == ()
    assert set(net.state_dict()) == keys


def test_descriptors_are_passed_on_and_transposed_convolutions_stay_per_tensor() -> None:
    net = Net()
    four = QuantDescriptor(num_bits=4)
    qat.quantize_(net, input_desc=four, weight_desc=QuantDescriptor(num_bits=4, axis=0, narrow_range=True))
    assert net.stem._input_quantizer.descriptor == four
    assert net.stem._weight_quantizer.descriptor.num_bits == 4
    assert net.blocks[2]._weight_quantizer.descriptor.axis is None


def test_quantizers_know_their_layer() -> None:
    net = Net()
    qat.quantize_(net)
    assert net.blocks[0]._input_quantizer.name == "blocks.0._input_quantizer"


def test_reasons_survive_a_copy() -> None:
    net = Net()
    qat.quantize_(net, exclude="head")
    assert "excluded" in qat.summary(copy.deepcopy(net)).left_float["head"]


def test_swin_attention_is_left_float_with_the_reason() -> None:
    """Kind: layer never seen in calibration: torchvision's Swin reads qkv.weight itself."""
    from torchvision.models.swin_transformer import ShiftedWindowAttentionV2

    net = nn.Sequential(nn.Linear(8, 8), ShiftedWindowAttentionV2(8, [2, 2], [0, 0], 2))
    report = qat.quantize_(net)
    assert report.converted == ("0",)
    assert "ShiftedWindowAttention" in report.left_float["1.qkv"]
    qat.calibrate(net, [torch.randn(1, 4, 4, 8)], progress=False)


def test_transformer_encoder_uses_its_quantizers_in_evaluation() -> None:
    """Kind: layer never seen in calibration: torch's fused path for evaluation reads linear1's weight by itself."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 6, 16), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad():
        report = qat.quantize_(net)
        assert report.converted == tuple(f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2))
        qat.calibrate(net, [{"src": x, "src_key_padding_mask": padding}], progress=False)
        quantized = net(x, src_key_padding_mask=padding)
        weights = net.layers[1].linear1._weight_quantizer
        weights.amax = weights.amax / 50
        assert not torch.equal(net(x, src_key_padding_mask=padding), quantized)


def test_a_float_encoder_layer_keeps_its_fast_path() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    qat.quantize_(net, include="0")
    assert net[1].activation_relu_or_gelu == 1


def test_reasons_of_prepare_stay() -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 4))
    qat.prepare(net, torch.randn(1, 3, 8, 8))
    before = qat.summary(net).left_float
    assert "logits" in before["4"]
    qat.quantize_(net, include="2")
    assert qat.summary(net).left_float == before
    assert qat.quantize_(net, include="4").converted == ("4",)
    assert "4" not in qat.summary(net).left_float
