"""What holds for every quant module."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import qat.nn as qnn
from qat.errors import NotCalibratedError
from qat.quantizer import QuantizerState, TensorQuantizer, named_quantizers, set_quantizer_state
from quant_cases import ALL, UNWEIGHTED, WEIGHTED, Case, assert_same, calibrate, first, reference


@pytest.fixture(params=ALL, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def _twins(case: Case) -> tuple[nn.Module, nn.Module]:
    plain, quant = case.make_float(), case.make_quant()
    result = quant.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(key.endswith("_quantizer._amax") for key in result.missing_keys)
    return plain, quant


def test_every_torch_class_of_the_table_has_a_case() -> None:
    assert {case.float_class for case in ALL} == set(qnn.QUANT_CLASSES)


def test_quant_class_is_a_subclass_that_adds_only_quantizers(case: Case) -> None:
    plain, quant = _twins(case)
    assert isinstance(quant, case.float_class)
    assert type(quant).__name__ == f"Quant{case.float_class.__name__}"
    assert [name for name, _ in quant.named_parameters()] == [name for name, _ in plain.named_parameters()]
    added = set(quant.state_dict()) - set(plain.state_dict())
    assert added and all("_quantizer._" in key for key in added)


def test_passing_through_equals_the_torch_module(case: Case) -> None:
    plain, quant = _twins(case)
    set_quantizer_state(quant, QuantizerState.PASSTHROUGH)
    x = case.input()
    assert_same(quant(x), plain(x))


def test_calibrating_computes_in_float(case: Case) -> None:
    plain, quant = _twins(case)
    set_quantizer_state(quant, QuantizerState.CALIBRATING)
    x = case.input()
    torch.testing.assert_close(quant(x), plain(x))


def test_uncalibrated_module_refuses_to_run(case: Case) -> None:
    with pytest.raises(NotCalibratedError):
        case.make_quant()(case.input())


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_weighted_module_equals_reference_bit_for_bit(case: Case) -> None:
    plain, quant = _twins(case)
    x = case.input()
    calibrate(quant, x)
    axis = None if isinstance(plain, nn.modules.conv._ConvTransposeNd) else 0
    plain.weight.data = reference(plain.weight, axis, narrow=True)
    assert_same(quant(x), plain(reference(x)))


@pytest.mark.parametrize("case", UNWEIGHTED, ids=str)
def test_unweighted_module_equals_reference_bit_for_bit(case: Case) -> None:
    plain, quant = _twins(case)
    x = case.input()
    calibrate(quant, x)
    assert not torch.equal(reference(x), x)
    assert_same(quant(x), plain(reference(x)))


def test_deepcopy_pickle_and_torch_save_keep_the_output(case: Case) -> None:
    quant, x = case.make_quant(), case.input()
    calibrate(quant, x)
    expected = quant(x)
    buffer = io.BytesIO()
    torch.save(quant, buffer)
    buffer.seek(0)
    for copied in (
        copy.deepcopy(quant),
        pickle.loads(pickle.dumps(quant)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(copied) is type(quant)
        assert_same(copied(x), expected)


def test_state_dict_carries_calibration(case: Case) -> None:
    quant, x = case.make_quant(), case.input()
    calibrate(quant, x)
    fresh = case.make_quant()
    fresh.load_state_dict(quant.state_dict())
    assert_same(fresh(x), quant(x))


def test_gradients_reach_input_and_parameters(case: Case) -> None:
    quant = case.make_quant()
    x = case.input().requires_grad_()
    calibrate(quant, x.detach())
    first(quant(x)).square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    for name, parameter in quant.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_model_returns_half_and_keeps_scales_in_float32(case: Case, dtype: torch.dtype) -> None:
    if case.float_class is nn.AvgPool3d:
        pytest.skip("torch has no half-precision AvgPool3d on the CPU")
    quant, x = case.make_quant(), case.input()
    calibrate(quant, x)
    expected = first(quant(x))
    quant.to(dtype)
    actual = first(quant(x.to(dtype)))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, rtol=0.1, atol=0.1)
    assert all(quantizer.amax.dtype == torch.float32 for _, quantizer in named_quantizers(quant))


def test_runs_under_autocast(case: Case) -> None:
    quant, x = case.make_quant(), case.input()
    calibrate(quant, x)
    expected = first(quant(x))
    with torch.autocast("cpu", torch.bfloat16):
        actual = first(quant(x))
    torch.testing.assert_close(actual.float(), expected, rtol=0.1, atol=0.1)


def test_exports_with_a_dynamic_batch_and_compiles_whole(case: Case) -> None:
    quant, x = case.make_quant().eval(), case.input()
    calibrate(quant, x)
    expected = quant(x)
    batch = 1 if isinstance(quant, nn.LSTM) and not quant.batch_first else 0
    program = torch.export.export(quant, (x,), dynamic_shapes=({batch: torch.export.Dim("n", min=2)},))
    double = torch.cat([x, x], batch)
    torch.testing.assert_close(program.module()(double), quant(double))
    # Dynamo leaves any nn.LSTM to eager unless told otherwise; QuantLSTM computes in plain operators.
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        assert_same(torch.compile(quant, backend="eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize("case", [c for c in WEIGHTED + UNWEIGHTED if len(c.shape) == 4], ids=str)
def test_channels_last_gives_the_same_numbers(case: Case) -> None:
    quant, x = case.make_quant(), case.input()
    calibrate(quant, x)
    expected = quant(x)
    quant.to(memory_format=torch.channels_last)
    actual = quant(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected)


def test_quantizers_have_public_names() -> None:
    quant = qnn.QuantConv2d(3, 4, 1)
    assert quant.input_quantizer is quant._input_quantizer
    assert quant.weight_quantizer is quant._weight_quantizer
    with pytest.raises(AttributeError):
        quant.input_quantizer = TensorQuantizer()
    with pytest.raises(AttributeError):
        _ = qnn.QuantMaxPool2d(2).weight_quantizer


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("channels", "groups"), [((3, 8), 1), ((8, 3), 1), ((4, 4), 4), ((6, 4), 2)])
def test_conv_transpose_per_tensor_whatever_the_channels(dims: int, channels: tuple[int, int], groups: int) -> None:
    float_class = getattr(nn, f"ConvTranspose{dims}d")
    plain = float_class(*channels, 3, stride=2, groups=groups)
    quant = qnn.QUANT_CLASSES[float_class](*channels, 3, stride=2, groups=groups)
    quant.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, channels[0], *[4] * dims)
    calibrate(quant, x)
    assert quant.weight_quantizer.amax.shape == ()
    plain.weight.data = reference(plain.weight, narrow=True)
    size = [10] * dims
    assert_same(quant(x, output_size=size), plain(reference(x), output_size=size))


@pytest.mark.parametrize("axis", [0, 1])
def test_per_channel_conv_transpose_is_right_and_warns_of_float(axis: int) -> None:
    desc = qat_weight(axis)
    with pytest.warns(UserWarning, match="in float"):
        quant = qnn.QuantConvTranspose2d(3, 5, 2, quant_desc_weight=desc)
    plain = nn.ConvTranspose2d(3, 5, 2)
    quant.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 3, 4, 4)
    calibrate(quant, x)
    plain.weight.data = reference(plain.weight, axis, narrow=True)
    assert_same(quant(x), plain(reference(x)))


def test_only_an_axis_that_runs_in_float_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qnn.QuantConv2d(3, 4, 3, quant_desc_weight=qat_weight(-4))
        qnn.QuantConvTranspose2d(3, 4, 3)
    with pytest.warns(UserWarning, match="axis=1"):
        qnn.QuantLinear(3, 4, quant_desc_weight=qat_weight(1))


def qat_weight(axis: int) -> "qnn.base.QuantDescriptor":
    return qnn.base.QuantDescriptor(axis=axis, narrow_range=True)
