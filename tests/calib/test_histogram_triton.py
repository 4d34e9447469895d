"""The GPU's collecting, run on the CPU by Triton's interpreter, against the torch operations, bit for bit."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch only")

CODE = """
import itertools, math, torch
from qat.calib import HistogramCalibrator, histogram, histogram_triton

# torch counts integers on a GPU only.
histogram_triton.count_places = lambda places, bins: torch.bincount(places[places >= 0], minlength=bins)
torch.manual_seed(0)
batches = [torch.zeros(7), torch.randn(2, 3, 4, 5) * 1e-3, torch.randn(5000), torch.randn(4096) * 100,
           torch.full((3,), 1e-38), torch.randn(6, 8)[:, ::2] * 1e30, torch.randn(9).to(torch.bfloat16),
           torch.randn(10, dtype=torch.float64), torch.empty(0, 3), torch.tensor([-4.0, 1.0]), torch.tensor([2.0**100])]
extras = [], [torch.tensor([1.0, math.nan])], [torch.tensor([-math.inf, 2.0]), torch.tensor([math.nan])]
for extra, histogram_triton.SMALL in itertools.product(extras, (0, 2**22)):
    histogram._gpu_kernels = lambda x: None
    plain, fused = HistogramCalibrator(), HistogramCalibrator()
    for batch in (*batches, *extra):
        histogram._gpu_kernels = lambda x: None
        plain.collect(batch)
        histogram._gpu_kernels = lambda x: histogram_triton
        fused.collect(batch)
        for a, b in ((plain._counts, fused._counts), (plain._exponent, fused._exponent),
                     (plain._max._max, fused._max._max), (plain._max._bad_batch, fused._max._bad_batch)):
            assert torch.equal(a.double().nan_to_num(7), b.double().nan_to_num(7)), (batch.shape, a, b)
            assert a.dtype == b.dtype
    assert int(plain._counts.sum()) > 10000 - 900
print("histograms equal")
"""


def test_collecting_equals_the_reference_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "histograms equal"
