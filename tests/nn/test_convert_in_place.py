import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import qat.nn as qnn
from qat.descriptor import QUANT_DESC_8BIT_PER_TENSOR, QuantDescriptor
from qat.errors import DescriptorError
from qat.quantizer import TensorQuantizer, named_quantizers
from quant_cases import ALL, Case, assert_same, calibrate


class InitOnly(nn.Linear):
    """Computes nothing of its own, so it converts."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return "ours"


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Grandchild(OwnForward):
    pass


class OwnConv(nn.Conv2d):
    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, weight * 2, bias)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_conversion_keeps_identity_parameters_hooks_and_mode(case: Case) -> None:
    module = case.make_float().eval()
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    before = dict(module.named_parameters())
    assert qnn.conversion_obstacle(module) is None
    quant = qnn.quant_class_for(module).convert_(module)
    assert quant is module and type(module) is case.quant_class
    after = dict(module.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    assert not any(quantizer.training for _, quantizer in named_quantizers(module))
    x = case.input()
    calibrate(module, x)
    built = case.make_quant().eval()
    assert set(built.state_dict()) == set(module.state_dict())
    built.load_state_dict(module.state_dict())
    assert_same(module(x), built(x))
    assert len(calls) == 2


def test_quantizers_go_to_the_weight_device_unless_told() -> None:
    linear = qnn.QuantLinear.convert_(nn.Linear(3, 4, device="meta"))
    assert linear._input_quantizer._amax.device.type == "meta"
    pool = qnn.QuantMaxPool2d.convert_(nn.MaxPool2d(2), device="meta")
    assert pool._input_quantizer._amax.device.type == "meta"
    norm = qnn.QuantInstanceNorm2d.convert_(nn.InstanceNorm2d(2, track_running_stats=True, device="meta"))
    assert norm._input_quantizer._amax.device.type == "meta"
    assert qnn.QuantConv1d(1, 2, 3, device="meta")._weight_quantizer._amax.device.type == "meta"


@pytest.mark.gpu
def test_quantizers_go_to_the_gpu_of_the_weight() -> None:
    layer = qnn.QuantConv2d.convert_(nn.Conv2d(3, 4, 3).cuda())
    x = torch.randn(2, 3, 8, 8, device="cuda")
    calibrate(layer, x)
    assert layer._input_quantizer._amax.is_cuda and layer(x).is_cuda


def test_descriptors_given_to_convert_are_used() -> None:
    narrow, wide = QuantDescriptor(num_bits=4), QuantDescriptor(num_bits=6)
    linear = qnn.QuantLinear.convert_(nn.Linear(2, 2), narrow, wide)
    assert (linear.input_quantizer.descriptor, linear.weight_quantizer.descriptor) == (narrow, wide)
    pool = qnn.QuantAvgPool2d.convert_(nn.AvgPool2d(2), narrow, wide)
    assert [quantizer.descriptor for _, quantizer in named_quantizers(pool)] == [narrow]


def test_shared_module_stays_shared() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    qnn.QuantLinear.convert_(shared)
    assert model[0] is model[2] and len(list(named_quantizers(model))) == 2


def test_subclass_without_own_forward_converts_and_pickles() -> None:
    module = InitOnly(3, 4)
    assert qnn.conversion_obstacle(module) is None
    qnn.QuantLinear.convert_(module)
    assert isinstance(module, InitOnly) and isinstance(module, qnn.QuantLinear)
    assert type(module).__name__ == "QuantInitOnly" and repr(module).startswith("QuantInitOnly(\n  ours")
    x = torch.randn(2, 3)
    calibrate(module, x)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied) is type(module)
        assert_same(copied(x), module(x))
    assert type(qnn.QuantLinear.convert_(InitOnly(1, 2))) is type(module)


def _replaced_forward() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


OBSTACLES = [
    (lambda: nn.Embedding(3, 2), "no quant class"),
    (lambda: OwnForward(2, 2), "OwnForward .* own forward"),
    (lambda: Grandchild(2, 2), "OwnForward .* own forward"),
    (lambda: OwnConv(2, 2, 1), "own _conv_forward"),
    (_replaced_forward, "replaced on the instance"),
    (lambda: nn.MultiheadAttention(4, 2).out_proj, "MultiheadAttention"),
    (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "parametrized tensors .weight."),
    (lambda: prune.l1_unstructured(nn.Linear(2, 2), "weight", 1), "recomputed"),
    (lambda: prune.l1_unstructured(nn.LSTM(2, 2), "weight_ih_l0", 1), "recomputed"),
    (lambda: weight_norm(nn.Conv2d(2, 2, 1)), "recomputed"),
    (lambda: nn.LazyLinear(2), "no shape yet"),
    (lambda: nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
    (lambda: qnn.QuantLinear(2, 2), "has quantizers already"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "reason"), OBSTACLES)
def test_obstacle_is_named_and_conversion_refused_untouched(make, reason) -> None:
    module = make()
    kind, children = type(module), list(module.children())
    assert re.search(reason, qnn.conversion_obstacle(module) or "")
    quant_class = qnn.quant_class_for(module)
    if quant_class is not None:
        with pytest.raises(TypeError, match=reason):
            quant_class.convert_(module)
    assert type(module) is kind and list(module.children()) == children


def test_permanent_pruning_and_initialised_lazy_modules_convert() -> None:
    pruned = prune.l1_unstructured(nn.Linear(2, 2), "weight", 1)
    prune.remove(pruned, "weight")
    assert qnn.conversion_obstacle(pruned) is None
    lazy = nn.LazyLinear(2)
    lazy(torch.randn(1, 3))
    assert qnn.conversion_obstacle(lazy) is None


def test_wrong_class_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes an instance of Conv2d, not Linear"):
        qnn.QuantConv2d.convert_(nn.Linear(2, 2))


def test_default_descriptors_are_per_class_and_hold_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (qnn.QuantConv2d, qnn.QuantLinear):
        monkeypatch.setattr(cls, "default_quant_desc_input", cls.default_quant_desc_input)
        monkeypatch.setattr(cls, "default_quant_desc_weight", cls.default_quant_desc_weight)
    before = qnn.QuantConv2d(1, 1, 1)
    histogram, per_tensor = QuantDescriptor(calib_method="histogram"), QuantDescriptor(narrow_range=True)
    qnn.QuantConv2d.set_default_quant_desc_input(histogram)
    qnn.QuantConv2d.set_default_quant_desc_weight(per_tensor)
    for after in (qnn.QuantConv2d(1, 1, 1), qnn.QuantConv2d.convert_(nn.Conv2d(1, 1, 1))):
        assert after.input_quantizer.descriptor == histogram
        assert after.weight_quantizer.descriptor == per_tensor
    assert before.input_quantizer.descriptor == QUANT_DESC_8BIT_PER_TENSOR
    assert qnn.QuantLinear(1, 1).input_quantizer.descriptor == QUANT_DESC_8BIT_PER_TENSOR
    qnn.QuantLinear.set_default_quant_desc_input(histogram)
    assert qnn.QuantLinear.convert_(InitOnly(1, 1)).input_quantizer.descriptor == histogram


def test_wrong_descriptors_and_keywords_are_sentences() -> None:
    with pytest.raises(DescriptorError, match="not a QuantDescriptor"):
        qnn.QuantLinear.set_default_quant_desc_input("int8")
    with pytest.raises(DescriptorError, match=r"quant_desc_weight of QuantLinear is 8"):
        qnn.QuantLinear(1, 1, quant_desc_weight=8)
    with pytest.raises(DescriptorError, match="QuantMaxPool2d quantizes no weight"):
        qnn.QuantMaxPool2d.set_default_quant_desc_weight(QuantDescriptor())
    with pytest.raises(DescriptorError, match="QuantMaxPool2d quantizes no weight"):
        qnn.QuantMaxPool2d(2, quant_desc_weight=QuantDescriptor())
    with pytest.raises(TypeError, match="no keyword 'quant_desc_inputs'"):
        qnn.QuantLinear(1, 1, quant_desc_inputs=QuantDescriptor())
    with pytest.raises(TypeError, match="unexpected keyword argument 'strides'"):
        qnn.QuantConv2d(1, 1, 1, strides=2)


def test_bias_is_never_quantized() -> None:
    layer = qnn.QuantLinear(2, 1)
    layer.weight.data.zero_()
    layer.bias.data.fill_(0.123456)
    layer.weight_quantizer.amax = torch.ones(1)
    layer.input_quantizer.amax = 1.0
    assert layer(torch.ones(1, 2)).item() == layer.bias.item()
    assert sum(isinstance(child, TensorQuantizer) for child in layer.children()) == 2
