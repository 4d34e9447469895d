"""Random tensors through the operator, the quantizers and the calibrators, against NumPy and against the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qat
from qat.calib import HistogramCalibrator, MaxCalibrator
from qat.descriptor import MIN_SCALE
from qat.errors import CalibrationError
from qat.quantizer import QuantizerState

FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38, -3.4028235e38, 65504.0, 2.0**-24, 0.5]),
)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


@st.composite
def tensors(draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOATS, dtypes: bool = True) -> Tensor:
    """Of 0 to 4 dimensions, also empty; constant or not; contiguous, channels-last, a view with gaps or transposed."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    count = math.prod(shape)
    few = draw(st.lists(elements, min_size=1, max_size=6))
    order = draw(st.lists(st.integers(0, len(few) - 1), min_size=count, max_size=count))
    x = torch.tensor([few[i] for i in order], dtype=torch.float64).reshape(shape)
    x = x.to(draw(DTYPES) if dtypes else torch.float32)
    layout = draw(st.sampled_from(["contiguous", "channels_last", "gaps", "transposed"]))
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "gaps" and x.dim():
        return torch.stack([x, x], -1)[..., 0]
    return x.transpose(0, -1) if layout == "transposed" and x.dim() > 1 else x


def _reference(x: Tensor, amax: np.ndarray, axis: int | None, low: int, high: int) -> np.ndarray:
    scale = np.maximum(np.float32(amax) / np.float32(high), np.float32(MIN_SCALE)).astype(np.float32)
    if axis is not None:
        scale = scale.reshape([-1 if dim == axis else 1 for dim in range(x.dim())])
    with np.errstate(over="ignore", invalid="ignore"):
        return np.clip(np.rint(x.float().numpy() / scale), low, high) * scale


@settings(max_examples=300)
@given(tensors(), st.floats(0, 2.0**127, width=32), st.booleans())
def test_fake_quantize_is_numpy_bit_for_bit(x: Tensor, amax: float, narrow: bool) -> None:
    low = -127 if narrow else -128
    y = qat.fake_quantize(x, torch.tensor(amax), None, low, 127)
    assert y.shape == x.shape and y.dtype == x.dtype
    expected = torch.from_numpy(np.asarray(_reference(x, np.array(amax), None, low, 127))).to(x.dtype)
    assert torch.equal(y, expected)


@settings(max_examples=200)
@given(tensors(), st.data())
def test_per_channel_is_numpy_bit_for_bit_and_gradients_pass_inside(x: Tensor, data: st.DataObject) -> None:
    if x.dim() == 0:
        return
    axis = data.draw(st.integers(-x.dim(), x.dim() - 1))
    channels = x.shape[axis]
    amax = data.draw(st.lists(st.floats(0, 2.0**100, width=32), min_size=channels, max_size=channels))
    x.requires_grad_()
    y = qat.fake_quantize(x, torch.tensor(amax, dtype=torch.float32), axis, -127, 127)
    expected = _reference(x.detach(), np.array(amax, np.float32), axis % x.dim(), -127, 127)
    assert torch.equal(y.detach(), torch.from_numpy(np.asarray(expected)).to(x.dtype))
    y.sum().backward()
    assert x.grad is not None and bool(((x.grad == 0) | (x.grad == 1)).all())


@settings(max_examples=200)
@given(st.lists(tensors(), min_size=1, max_size=4), st.sampled_from(["max", "entropy", "mse", "percentile"]))
def test_calibrators_give_a_usable_amax(batches: list[Tensor], method: str) -> None:
    calibrator = HistogramCalibrator()
    for x in batches:
        calibrator.collect(x)
    seen = [x for x in batches if x.numel()]
    if any(not bool(torch.isfinite(x.float()).all()) for x in seen):  # a float64 beyond float32
        return
    amax = calibrator.compute_amax(method)
    if not seen:
        assert amax is None
        return
    largest = max(float(x.float().abs().max()) for x in seen)
    assert amax is not None and amax.shape == () and amax.dtype == torch.float32
    assert 0 <= float(amax) <= largest
    assert method != "max" or float(amax) == largest
    histogram = calibrator.histogram()
    assert histogram is not None and int(histogram[0].sum()) == sum(x.numel() for x in seen)


@settings(max_examples=150)
@given(tensors(st.one_of(FLOATS, st.sampled_from([math.nan, math.inf, -math.inf])), dtypes=False), st.booleans())
def test_nan_and_inf_are_an_error_that_names_the_batch(x: Tensor, histogram: bool) -> None:
    calibrator = HistogramCalibrator() if histogram else MaxCalibrator()
    calibrator.collect(torch.ones(3))
    calibrator.collect(x)
    if x.numel() and not bool(torch.isfinite(x).all()):
        with pytest.raises(CalibrationError, match="batch 1 "):
            calibrator.compute_amax()
    else:
        assert calibrator.compute_amax() is not None


BELOW_OVERFLOW = FLOATS.map(lambda value: max(-(2.0**127), min(2.0**127, value)))
"""The largest code times the scale of the largest float32 rounds to infinity, in ONNX as well."""


@settings(max_examples=150)
@given(tensors(BELOW_OVERFLOW, dtypes=False), st.sampled_from(["max", "histogram"]))
def test_a_quantizer_calibrated_on_a_tensor_quantizes_it(x: Tensor, calib_method: str) -> None:
    quantizer = qat.TensorQuantizer(qat.QuantDescriptor(calib_method=calib_method))
    quantizer.set_state(QuantizerState.CALIBRATING)
    assert quantizer(x) is x
    if not quantizer.load_calib_amax("max"):
        assert not x.numel()
        return
    quantizer.set_state(QuantizerState.QUANTIZING)
    y = quantizer(x)
    assert bool(torch.isfinite(y).all()) and quantizer.scale is not None
    # Half a step, and the rounding of the largest code times the scale.
    assert bool(((y - x).abs() <= quantizer.scale * 0.5001 + x.abs() * 1e-6).all())
    again = qat.TensorQuantizer(quantizer.descriptor)
    again.load_state_dict(quantizer.state_dict())
    assert torch.equal(again(x), y)


def test_a_range_that_ends_beyond_float32() -> None:
    calibrator = HistogramCalibrator()
    for value in (0.0, 3.4028235e38):
        calibrator.collect(torch.tensor(value))
    for method in calibrator.methods:
        amax = calibrator.compute_amax(method)
        assert amax is not None and math.isfinite(float(amax))
