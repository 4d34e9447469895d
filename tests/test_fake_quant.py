import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat.descriptor import MIN_SCALE
from qat.fake_quant import fake_quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
gpu = pytest.param("cuda", marks=pytest.mark.gpu)


def reference(x: Tensor, amax: Tensor, axis: int | None, low: int, high: int) -> Tensor:
    """Quantize and back in NumPy float32, from the definition alone."""
    scale = np.maximum(amax.cpu().numpy().astype(np.float32) / np.float32(high), np.float32(MIN_SCALE))
    if axis is not None:
        scale = scale.reshape([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])
    codes = np.clip(np.rint(x.detach().cpu().float().numpy() / scale), low, high)
    return torch.from_numpy(np.asarray(codes * scale, dtype=np.float32)).to(x.dtype)


def inputs(dtype: torch.dtype, shape: tuple[int, ...] = (4, 6, 5, 7)) -> Tensor:
    x = torch.randn(shape) * 3
    ties = (torch.arange(x.numel()) % 300 - 150).reshape(shape) * 0.5 * (4.0 / 127)
    return torch.cat([x, ties]).to(dtype)


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("bounds", [(-128, 127), (-127, 127), (-8, 7)])
def test_bit_exact_against_numpy(device: str, dtype: torch.dtype, axis: int | None, bounds: tuple[int, int]) -> None:
    x = inputs(dtype).to(device)
    amax = torch.tensor(4.0) if axis is None else torch.rand(x.shape[axis]) * 4 + 0.1
    y = fake_quantize(x, amax.to(device), axis, *bounds)
    assert y.dtype == dtype
    assert torch.equal(y.cpu(), reference(x, amax, axis, *bounds))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=0, max_size=50),
    st.floats(min_value=0, max_value=2.0**100, width=32),
)
def test_bit_exact_on_any_floats(values: list[float], amax: float) -> None:
    x = torch.tensor(values)
    assert torch.equal(fake_quantize(x, torch.tensor(amax)), reference(x, torch.tensor(amax), None, -128, 127))


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_memory_formats_and_odd_shapes(device: str) -> None:
    x = inputs(torch.float32).to(device)
    amax = torch.tensor(4.0, device=device)
    want = reference(x, amax, None, -128, 127).to(device)
    for view in (x.contiguous(memory_format=torch.channels_last), x.transpose(1, 3).transpose(1, 3)):
        y = fake_quantize(view, amax)
        assert torch.equal(y, want)
        assert y.stride() == view.stride()
    strided = x[:, ::2, :, 1::3]
    assert torch.equal(fake_quantize(strided, amax), want[:, ::2, :, 1::3])
    expanded = x[:1].expand(5, -1, -1, -1)
    assert torch.equal(fake_quantize(expanded, amax), want[:1].expand(5, -1, -1, -1))
    assert fake_quantize(torch.tensor(5.0, device=device), amax).item() == 4.0
    assert fake_quantize(torch.empty(0, 3, device=device), amax).shape == (0, 3)
    assert math.isnan(fake_quantize(torch.tensor(math.nan, device=device), amax).item())


def test_codes_are_rounded_half_to_even_and_clamped() -> None:
    amax = torch.tensor(127.0)
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 500.0, -127.6, -500.0])
    assert fake_quantize(x, amax).tolist() == [0, 2, 2, 0, -2, 126, 127, -128, -128]
    assert fake_quantize(x, amax, min_bound=-127).tolist()[-2:] == [-127, -127]


def test_float32_arithmetic_under_autocast() -> None:
    x, amax = inputs(torch.bfloat16), torch.tensor(4.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fake_quantize(x, amax)
    assert torch.equal(y, reference(x, amax, None, -128, 127))


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_passes_inside_the_clamp_only(dtype: torch.dtype, device: str) -> None:
    values = [-200.0, -128.5, -128.6, -3.2, 0.0, 5.5, 127.4, 127.5, 200.0]
    x = torch.tensor(values, dtype=dtype, device=device).requires_grad_()
    codes = x.detach().float().round()
    inside = (codes >= -128) & (codes <= 127)
    weight = torch.arange(1.0, 10.0, dtype=dtype, device=device)
    (fake_quantize(x, torch.tensor(127.0, device=device)) * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, torch.where(inside, weight, 0))
    assert 0 < int(inside.sum()) < 9


@pytest.mark.parametrize("low", [-128, -127])
@pytest.mark.parametrize("axis", [None, 1, 0])
def test_amax_gradient_is_lsq(axis: int | None, low: int) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float32) * 2
    size = 1 if axis is None else x.shape[axis]
    amax = (torch.tensor(1.5) if axis is None else torch.rand(size) + 1).requires_grad_()
    upstream = torch.randn_like(x)
    (fake_quantize(x, amax, axis, low) * upstream).sum().backward()
    shaped = (amax.detach() / 127).double().reshape([size if d == axis else 1 for d in range(3)])
    ratio = x.double() / shaped
    slope = torch.where(
        ratio.round() < low, float(low), torch.where(ratio.round() > 127, 127.0, ratio.round() - ratio)
    )  # Esser et al. 2020, equation 3
    gradient = (upstream.double() * slope).sum([d for d in range(3) if d != axis])
    # Section 2.2: the weights of a layer, or the features of one sample; here those that share a scale.
    count = {None: 60 if low == -127 else 20, 1: 15 if low == -127 else 5, 0: 20}[axis]
    want = gradient / (count * 127) ** 0.5 * 127
    assert amax.grad is not None
    torch.testing.assert_close(amax.grad.double(), want, rtol=1e-4, atol=1e-5)


def test_amax_gradient_of_an_activation_does_not_depend_on_how_the_batch_is_divided() -> None:
    x, amax = torch.randn(8, 4, 5), torch.tensor(1.5, requires_grad=True)
    (whole,) = torch.autograd.grad(fake_quantize(x, amax).square().mean(), amax)
    parts = [torch.autograd.grad(fake_quantize(part, amax).square().mean(), amax)[0] for part in x.chunk(4)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
    assert whole.abs() > 0.1


def test_operator_passes_torch_library_checks() -> None:
    samples = [
        (torch.randn(3, 4, requires_grad=True), torch.tensor(2.0), None, -128, 127),
        (torch.randn(3, 4, 2).to(torch.bfloat16), torch.rand(4) + 1, 1, -127, 127),
    ]
    for sample in samples:
        torch.library.opcheck(torch.ops.qat.fake_quantize.default, sample)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_gradient_for_every_layout(dtype: torch.dtype) -> None:
    base = inputs(dtype).cuda()
    grad = torch.randn(base.shape, device="cuda").to(dtype)
    amax = torch.rand(base.shape[1], device="cuda") * 4 + 0.1
    want = torch.ops.qat.fake_quantize_backward.default(*[t.cpu() for t in (grad, base, amax)], 1, -127, 127)
    for x in (
        base,
        base.contiguous(memory_format=torch.channels_last),
        base.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        leaf = x.detach().requires_grad_()
        fake_quantize(leaf, amax, 1, -127, 127).backward(grad)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.cpu(), want)


def test_compiles_and_exports() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fake_quantize(torch.relu(x), torch.tensor(2.0)) + 1

    x = torch.randn(4, 8)
    eager = Net()(x)
    compiled = torch.compile(Net(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), eager)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(Net(), (x,), dynamic_shapes={"x": {0: batch}})
    assert "fake_quantize" in str(program.graph)
    assert torch.equal(program.module()(torch.cat([x, x])), torch.cat([eager, eager]))


@pytest.mark.parametrize(
    ("x", "amax", "axis", "message"),
    [
        (torch.ones(3, dtype=torch.int32), torch.tensor(1.0), None, "floating-point"),
        (torch.ones(3), torch.ones(3), None, "3 elements"),
        (torch.ones(3, 4), torch.ones(3), 1, "dimension 1"),
        (torch.ones(3), torch.ones(3), 2, "axis=2"),
    ],
)
def test_bad_input_is_a_sentence(x: Tensor, amax: Tensor, axis: int | None, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fake_quantize(x, amax, axis)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_bits_and_gradients_are_the_eager_ones(axis: int | None, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    base = inputs(dtype, (3, 4, 5, 6))
    base.view(-1)[:3] = torch.tensor([math.inf, -math.inf, 60000.0]).to(dtype)
    amax = torch.tensor(4.0) if axis is None else torch.rand(base.shape[axis]) * 4 + 0.1
    results = []
    for call in (fake_quantize, torch.compile(fake_quantize, fullgraph=True, backend="aot_eager", dynamic=False)):
        x, learned = base.clone().requires_grad_(), amax.clone().requires_grad_()
        frozen = call(x, amax, axis, -127, 127)
        (grad,) = torch.autograd.grad(frozen, x, torch.ones_like(x))
        finite = base.nan_to_num(0, 3, -3).requires_grad_()
        (slope,) = torch.autograd.grad(call(finite, learned, axis, -127, 127).float().sum(), learned)
        results.append((frozen.detach(), grad, slope))
    (y, grad, slope), (compiled_y, compiled_grad, compiled_slope) = results
    assert torch.equal(y, compiled_y) and torch.equal(grad, compiled_grad) and 0 < grad.sum() < grad.numel()
    torch.testing.assert_close(slope, compiled_slope)
