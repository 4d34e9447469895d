import math

import pytest
import torch
from torch import Tensor

from qat.calib import HistogramCalibrator, MaxCalibrator, make_calibrator, register_calibrator
from qat.calib import histogram as histogram_module
from qat.errors import CalibrationError, DescriptorError

METHODS = ["max", "entropy", "mse", "percentile"]


def amax(calibrator: HistogramCalibrator | MaxCalibrator, method: str | None = None, **options: float) -> float:
    value = calibrator.compute_amax(method, **options)
    assert value is not None
    assert value.dtype == torch.float32
    return value.item()


def collected(*batches: Tensor) -> HistogramCalibrator:
    calibrator = HistogramCalibrator()
    for batch in batches:
        calibrator.collect(batch)
    return calibrator


def test_max_per_tensor_and_per_channel() -> None:
    x = torch.randn(4, 3, 5)
    tensor, channel = MaxCalibrator(), MaxCalibrator(axis=1)
    for batch in (x, -2 * x):
        tensor.collect(batch)
        channel.collect(batch)
    assert amax(tensor) == (2 * x).abs().max()
    value = channel.compute_amax()
    assert value is not None
    assert torch.equal(value, (2 * x).abs().amax((0, 2)))
    with pytest.raises(CalibrationError, match="needs a histogram"):
        tensor.compute_amax("entropy")


def test_counts_are_right_and_do_not_depend_on_the_order() -> None:
    batches = [torch.randn(1000) * 10**k for k in (0, -3, 2)] + [torch.zeros(10)]
    forward, backward = collected(*batches), collected(*reversed(batches))
    everything = collected(torch.cat(batches))
    assert torch.equal(forward._counts, backward._counts)  # type: ignore[arg-type]
    assert torch.equal(forward._counts, everything._counts)  # type: ignore[arg-type]
    width = 2.0 ** int(everything._exponent) / 4096  # type: ignore[arg-type]
    want = torch.bincount((torch.cat(batches).abs().double() / width).long(), minlength=4096)
    assert torch.equal(everything._counts, want)  # type: ignore[arg-type]
    for method in METHODS:
        assert amax(forward, method) == amax(backward, method) == amax(everything, method)


def test_counts_beyond_float32_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind: histogram saturates (TensorRT#2757). The limit is lowered so that pieces are really cut."""
    calibrator = collected(torch.ones(8))
    calibrator._counts *= 2**25  # type: ignore[operator]
    calibrator.collect(torch.ones(1))
    assert int(calibrator._counts.sum()) == 2**28 + 1  # type: ignore[union-attr]
    monkeypatch.setattr(histogram_module, "EXACT_FLOAT_COUNT", 7)
    assert int(collected(torch.ones(100))._counts.sum()) == 100  # type: ignore[union-attr]


@pytest.mark.slow
def test_one_tensor_larger_than_float32_counts() -> None:
    counts = collected(torch.ones(2**24 + 3))._counts
    assert int(counts.max()) == 2**24 + 3  # type: ignore[union-attr]


@pytest.mark.parametrize("first", [0.0, 1e-38, 1e-30, 1e-6])
def test_first_batch_of_zeros_or_tiny_values_changes_nothing(first: float) -> None:
    data = torch.randn(5000)
    late = collected(torch.full((5000,), first), data)
    assert late._counts.numel() == 4096  # type: ignore[union-attr]
    for method in ("max", "mse"):
        assert amax(late, method) == pytest.approx(amax(collected(data), method), rel=2e-3)


def test_range_grows_by_many_orders_of_magnitude() -> None:
    calibrator = collected(*[torch.tensor([10.0**k]) for k in range(-30, 31)])
    assert int(calibrator._counts.sum()) == 61  # type: ignore[union-attr]
    assert amax(calibrator, "max") == pytest.approx(1e30)
    assert math.isfinite(amax(calibrator, "mse"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["max", "histogram"])
def test_nan_and_inf_name_the_batch(bad: float, kind: str) -> None:
    """Kind: NaN or Inf in calibration data (TensorRT#2126)."""
    calibrator = make_calibrator(kind, 8, None, False)
    for batch in (torch.ones(4), torch.tensor([1.0, bad, 2.0]), torch.tensor([bad])):
        calibrator.collect(batch)
    with pytest.raises(CalibrationError, match=r"batch 1 .*NaN or Inf"):
        calibrator.compute_amax("max")


def test_nothing_collected_is_none_and_reset_forgets() -> None:
    calibrator = collected(torch.ones(3))
    calibrator.reset()
    assert calibrator.compute_amax("mse") is None
    assert MaxCalibrator().compute_amax() is None
    calibrator.collect(torch.empty(0, 3))
    assert calibrator.compute_amax("entropy") is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_type_and_method_stays_within_the_data(method: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 50, 7).to(dtype).transpose(0, 2)
    value = amax(collected(x), method)
    assert 0.1 < value <= x.abs().max().item()


def test_constant_tensor_and_single_value() -> None:
    for method in METHODS:
        assert amax(collected(torch.full((100,), 0.75)), method) == pytest.approx(0.75, rel=1e-3)
        assert amax(collected(torch.zeros(100)), method) == 0.0


def test_clipping_methods_clip_an_outlier() -> None:
    x = torch.cat([torch.randn(100_000), torch.tensor([100.0])])
    calibrator = collected(x)
    assert amax(calibrator, "max") == 100
    assert amax(calibrator, "percentile", percentile=99.9) < 10
    assert amax(calibrator, "entropy") < 50
    assert amax(calibrator, "percentile", percentile=100) == 100


def test_unknown_method_option_axis_and_name() -> None:
    calibrator = collected(torch.ones(3))
    with pytest.raises(CalibrationError, match="'kl' is unknown"):
        calibrator.compute_amax("kl")
    with pytest.raises(CalibrationError, match="percentile=0"):
        calibrator.compute_amax("percentile", percentile=0)
    with pytest.raises(DescriptorError, match="axis=0"):
        HistogramCalibrator(axis=0)
    with pytest.raises(DescriptorError, match="power of two"):
        HistogramCalibrator(num_bins=1000)
    with pytest.raises(DescriptorError, match="Known: histogram, max"):
        make_calibrator("nope", 8, None, False)


def test_users_can_register_their_own() -> None:
    class Constant(MaxCalibrator):
        def compute_amax(self, method: str | None = None, **options: object) -> Tensor:
            return torch.tensor(7.0)

    register_calibrator("constant", Constant)
    try:
        assert make_calibrator("constant", 8, None, False).compute_amax() == 7.0
        with pytest.raises(DescriptorError, match="registered already"):
            register_calibrator("max", Constant)
    finally:
        from qat.calib import base

        del base._REGISTRY["constant"]


@pytest.mark.gpu
def test_gpu_and_cpu_choose_the_same() -> None:
    batches = [torch.randn(10_000) * k for k in (0.1, 3.0, 1.0)]
    cpu, cuda = collected(*batches), collected(*[b.cuda() for b in batches])
    assert torch.equal(cpu._counts, cuda._counts.cpu())  # type: ignore[union-attr, arg-type]
    for method in METHODS:
        assert amax(cpu, method) == amax(cuda, method)


@pytest.mark.gpu
def test_collecting_does_not_wait_for_the_gpu() -> None:
    calibrator, maximum = HistogramCalibrator(), MaxCalibrator(axis=0)
    x = torch.randn(64, 1000, device="cuda")
    calibrator.collect(x)
    maximum.collect(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            calibrator.collect(x)
            maximum.collect(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_batch_of_zeros_leaves_the_resolution_of_small_values() -> None:
    data = torch.randn(5000) * 1e-4
    assert torch.equal(collected(data, torch.zeros(9))._exponent, collected(data)._exponent)  # type: ignore[arg-type]
