"""The GPU kernels, run on the CPU by Triton's interpreter, against the torch implementation, bit for bit."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch only")

CASES = """
import itertools, math, torch
from qat import fake_quant_triton as kernels
from qat.fake_quant import fake_quantize

torch.manual_seed(0)
shapes = [(5,), (1,), (4097,), (3, 70, 9), (2, 6, 5, 7), (2, 3, 4, 5, 6)]
count = 0
# The interpreter truncates to bfloat16 where a GPU rounds: that type is tested on a GPU only.
bounds_ = [(-128, 127), (-127, 127), (-8, 7)]
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
            want = torch.ops.qat.fake_quantize.default(view, amax, axis, *bounds)
            got = kernels.forward(view, amax, axis, *bounds)
            assert torch.equal(got.nan_to_num(9), want.nan_to_num(9)), (dtype, shape, axis, bounds)
            assert got.stride() == view.stride() and math.isnan(got.view(-1)[0] if view is x else got.flatten()[0])
            want = torch.ops.qat.fake_quantize_backward.default(grad, view, amax, axis, *bounds)
            assert torch.equal(kernels.backward(grad, view, amax, axis, *bounds), want), (dtype, shape, axis, bounds)
            count += 1
assert not kernels.is_dense(torch.randn(4, 6)[:, ::2]) and kernels.is_dense(torch.randn(2, 3))
print(count, "cases equal")
"""


def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", CASES], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "192 cases equal"
