"""The GPU kernels, run on the CPU by Triton's interpreter, against the torch implementation, bit for bit.

The interpreter truncates to bfloat16 where a GPU rounds, and knows no vector widths: both are seen on a GPU only.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch only")

KERNELS = """
import itertools, math, torch, triton_interpreter
from qat import fake_quant_triton as kernels
from qat.fake_quant_reference import amax_gradient, lsq_gradient

torch.manual_seed(0)
shapes = [(5,), (1,), (4097,), (3, 70, 9), (2, 6, 5, 7), (2, 6, 4, 8), (2, 3, 4, 5, 6)]
count = 0
bounds_ = [(-128, 127), (-127, 127), (-8, 7)]

def within(bits, x):
    return kernels.select(torch.ones_like(x), bits, x.stride()).bool()

def positive(bits, x):
    return kernels.unpack(bits, (x.shape, x.stride(), torch.float32)).bool()

for dtype, shape, bounds in itertools.product([torch.float32, torch.float16], shapes, bounds_):
    for axis in (None, *range(len(shape))):
        x = (torch.randn(shape) * 3).to(dtype)
        x.view(-1)[0] = math.nan
        ties = x.numel() // 2 + 1
        x.view(-1)[1:ties] = ((torch.arange(1, ties) % 300 - 150) * 0.5 * (4 / 127)).to(dtype)
        amax = torch.tensor(4.0) if axis is None else torch.rand(shape[axis]) * 4
        grad = torch.randn(shape).to(dtype)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        for view in (x, *([x.contiguous(memory_format=formats[x.dim()])] if x.dim() in formats else [])):
            what = (dtype, shape, axis, bounds)
            want = torch.ops.qat.fake_quantize.default(view, amax, axis, *bounds)
            got, bits = kernels.forward(view, amax, axis, *bounds, kernels.AND_POSITIVE)
            assert torch.equal(got.nan_to_num(9), want.nan_to_num(9)), what
            assert got.stride() == view.stride() and math.isnan(got.flatten()[0])
            passes = torch.ops.qat.fake_quantize_backward.default(torch.ones_like(view), view, amax, axis, *bounds)
            assert torch.equal(within(bits, view), passes.bool()), what
            assert torch.equal(positive(bits, view), ~(view <= 0)), what
            want = torch.ops.qat.fake_quantize_backward.default(grad, view, amax, axis, *bounds)
            assert torch.equal(kernels.backward(grad, view, amax, axis, *bounds)[0], want), what
            assert torch.equal(kernels.select(grad, bits, view.stride()), want), what
            if axis is None:
                clean = view.nan_to_num(0)
                _, total = kernels.backward(grad, clean, amax, axis, *bounds, learned=True)
                wanted = amax_gradient(grad, clean, amax, axis, *bounds)
                got = lsq_gradient(total, clean, amax, axis, *bounds)
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
            count += 1
assert not kernels.is_dense(torch.randn(4, 6)[:, ::2]) and kernels.is_dense(torch.randn(2, 3))
print(count, "cases equal")
"""

DIVISION = """
import math, torch, triton_interpreter
from qat import fake_quant_triton as kernels

torch.manual_seed(0)
count = 0
special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38])
for exponent in (-30, -24, -20, -3, 0, 5, 60, 120, 127):
    for _ in range(6):
        amax = (torch.rand(()) + 1) * 2.0**exponent if exponent < 127 else torch.tensor(3.4028234663852886e38)
        scale = (amax / torch.tensor(127.0)).clamp_min(2.0**-24)
        ties = (torch.arange(-300, 300) * 0.5).float() * scale
        near = torch.cat([ties, *(torch.nextafter(ties, torch.tensor(way)) for way in (math.inf, -math.inf))])
        # An infinity beyond the largest amax there is counts as inside: its code overflows before it is clamped.
        x = torch.cat([near, torch.randn(2000) * scale * 60, special])
        x = x if exponent < 127 else x[x.isfinite()]
        want = torch.ops.qat.fake_quantize.default(x, amax, None, -128, 127)
        got, inside = kernels.forward(x, amax, None, -128, 127, kernels.WITHIN)
        assert torch.equal(got, want), (exponent, amax)
        grads = torch.ops.qat.fake_quantize_backward.default(torch.ones_like(x), x, amax, None, -128, 127)
        assert torch.equal(kernels.select(torch.ones_like(x), inside, x.stride()), grads)
        count += x.numel()
print(count, "values equal")
"""

AUTOGRAD = """
import torch, triton_interpreter
from qat import fake_quant_eager as eager, fake_quant_triton as kernels
from qat.fake_quant import fake_quantize

torch.manual_seed(0)
eager.SMALLEST_PACKED = 1
amax = torch.tensor(2.0)
plain = lambda x: fake_quantize(x, amax)
def packing(x):
    relu = eager._unpacked_relu(x)
    assert (relu is not None) == (x.grad_fn.name() == "ReluBackward0" and "qat_packed" not in x.grad_fn.metadata)
    return eager._KeepingBits.apply(x, amax, (None, -128, 127), kernels, relu)

for inplace in (False, True):
    results = []
    for quantize in (plain, packing):
        torch.manual_seed(1)
        x = torch.randn(3, 5, 8, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
        weight, other = torch.randn(6, 5, 3, 3, requires_grad=True), torch.randn(6, 5, 3, 3, requires_grad=True)
        hidden = torch.nn.functional.relu(x * 3, inplace=inplace)
        y = torch.nn.functional.conv2d(quantize(hidden), weight) + torch.nn.functional.conv2d(hidden, other)
        loss = torch.nn.functional.conv2d(quantize(torch.tanh(y)), other.transpose(0, 1)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([y, x.grad, weight.grad, other.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results)), inplace

x = torch.randn(4, 8, requires_grad=True)
hidden = torch.relu(x)
packing(hidden), packing(hidden).sum().backward()  # packed once, the second time it stays as it is
kept = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
    packing(torch.relu(x)).sum().backward()
assert len(kept) == 2

penalties = []
for quantize in (plain, packing):
    x = torch.randn(3, 4, generator=torch.manual_seed(3)).requires_grad_()
    factor = torch.ones((), requires_grad=True)
    (grad,) = torch.autograd.grad((quantize(torch.relu(x * 3)) * factor).sum(), x, create_graph=True)
    penalties += torch.autograd.grad(grad.square().sum(), factor)
assert torch.equal(*penalties) and penalties[0] > 0
x = torch.randn(4, 8, requires_grad=True)

def quantized(x):
    return packing(torch.relu(x * 2))
from torch.utils.checkpoint import checkpoint
checkpointed = lambda x: checkpoint(quantized, x, use_reentrant=False)
grads = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (quantized, checkpointed)]
assert torch.equal(*grads)
print("gradients equal")
"""

WEIGHTS = """
import torch, triton_interpreter
from qat import fake_quant_triton_weights as kernels, fake_quant_weights as weights_module
from qat.fake_quant import fake_quantize

torch.manual_seed(0)
shapes = [(4, 3, 5, 5), (7, 2000), (5, 1, 3, 3), (6, 33)]
for dtype, low in ((torch.float32, -127), (torch.float16, -127), (torch.float32, -128)):
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    weights[0] = weights[0].contiguous(memory_format=torch.channels_last)
    weights = [torch.nn.Parameter(w) for w in weights]
    amaxes = [torch.rand(w.shape[0]) * 3 + 0.1 for w in weights[:-1]] + [torch.tensor(-1.5)]
    amaxes = [torch.nn.Parameter(a) for a in amaxes]
    upstream = [torch.randn(w.shape).half() for w in weights]
    for used in ([0, 1, 2, 3], [1, 3]):
        results = []
        group = weights_module._Group(weights[0], (low, 127))
        plain = [fake_quantize(w, a.abs(), 0 if a.numel() > 1 else None, low) for w, a in zip(weights, amaxes)]
        fused = weights_module._Weights.apply(group, torch.float16, 4, *weights, *amaxes)
        for p, f, w in zip(plain, fused, weights):
            assert torch.equal(p.half(), f) and f.stride() == w.stride() and not f._is_view()
        for outputs in ([p.half() for p in plain], fused):
            loss = sum((outputs[i] * upstream[i]).float().sum() for i in used)
            grads = torch.autograd.grad(loss, [*weights, *amaxes], allow_unused=True)
            results.append([g for g in grads if g is not None])
        assert len(results[0]) == len(results[1]) == 2 * len(used)
        for i, (a, b) in enumerate(zip(*results)):
            if i < len(used):
                assert a.dtype == b.dtype == dtype and torch.equal(a, b) and a.any() and not a.all()
            else:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
for learned in (True, False):
    tensors = [*weights, *(a if learned else a.detach() for a in amaxes)]
    plain = [fake_quantize(w, a.abs(), 0 if a.numel() > 1 else None) for w, a in zip(weights, tensors[4:])]
    penalties = []
    for outputs in (plain, weights_module._Weights.apply(group, torch.float32, 4, *tensors)):
        factor = torch.ones((), requires_grad=True)
        inputs = [*weights, *(amaxes if learned else ())]
        grads = torch.autograd.grad(sum((o * factor).sum() for o in outputs), inputs, create_graph=True)
        penalties += torch.autograd.grad(sum(g.square().sum() for g in grads), factor)
    torch.testing.assert_close(*penalties)
with torch.no_grad():
    weights[0].add_(1)
fused[1].sum().backward(retain_graph=True)  # the changed one takes no part
try:
    fused[0].sum().backward()
except RuntimeError as error:
    assert "changed in place" in str(error)
else:
    raise AssertionError("a weight was changed in place unnoticed")
print("weights equal")
"""

CACHE = """
import copy, pickle, torch, triton_interpreter
from torch import nn
import qat
from qat import fake_quant_reference, fake_quant_triton, fake_quant_weights as weights_module
from qat import fake_quant_triton_weights as kernels

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 24, 3), nn.Flatten(), nn.Linear(24, 4))
qat.quantize_(model)
x = torch.randn(2, 3, 5, 5)
qat.calibrate(model, [x], progress=False)
launches = []
launch = kernels._launch
kernels._launch = lambda kernel, *rest, **more: launches.append(len(rest[0])) or launch(kernel, *rest, **more)
want = [model(x)]
want[0].sum().backward()
wanted = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
# As if the CPU were a GPU:
weights_module.gpu_kernels = lambda x, amax: fake_quant_triton
weights_module.on_gpu = lambda x: True
for step in range(3):
    loss = model(x)
    assert torch.equal(loss, want[0])
    loss.sum().backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted))
    model.zero_grad()
assert launches[-2:] == [48, 48], launches
model.eval()
with torch.no_grad():
    first = model(x)
    model[0].weight.data.mul_(-1)  # unseen by autograd, seen by the next forward
    assert not torch.equal(model(x), first)
    model[0].weight.data.mul_(-1)
    assert torch.equal(model(x), first)
    hidden = model[1](model[0](x))  # leaves the other two weights' results over
    model[2].weight.mul_(-1)
    assert torch.equal(model[2](hidden), copy.deepcopy(model)[2](hidden))
    model[2].weight.mul_(-1)
a, b = model(x), model(2 * x)  # two graphs, backward in any order
(a.sum() + 0).backward()
b.sum().backward()
twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
with torch.no_grad():
    twin[0].weight.zero_()
    assert torch.equal(model(x), first) and torch.equal(pickled(x), first) and not torch.equal(twin(x), first)
model.load_state_dict(twin.state_dict())
assert torch.equal(model(x), twin(x))
print("cache right")
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (KERNELS, "252 cases equal"),
        (DIVISION, "204145 values equal"),
        (AUTOGRAD, "gradients equal"),
        (WEIGHTS, "weights equal"),
        (CACHE, "cache right"),
    ],
    ids=["kernels", "division", "autograd", "weights", "cache"],
)
def test_kernels_equal_the_reference_in_the_interpreter(code: str, printed: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == printed
