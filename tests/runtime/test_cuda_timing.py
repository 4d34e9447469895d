import numpy as np
import pytest
import torch

from qat.errors import RunnerError
from qat.runtime import TorchRunner
from qat.runtime.cuda_timing import capture_graph, time_on_stream, time_streams
from qat.runtime.torch import measure_torch

pytestmark = pytest.mark.gpu


def _work(size: int, stream: torch.cuda.Stream):
    a = torch.randn(size, size, device="cuda")
    out = torch.empty_like(a)

    def enqueue() -> None:
        with torch.cuda.stream(stream):
            torch.mm(a, a, out=out)

    torch.cuda.synchronize()
    return enqueue, out


def test_more_work_takes_more_gpu_time() -> None:
    stream = torch.cuda.Stream()
    small, _ = _work(512, stream)
    large, _ = _work(4096, stream)
    fast, slow = (sorted(time_on_stream(work, stream, 3, 11)) for work in (small, large))
    assert len(fast) == 11 and 0 < fast[5] < slow[5] / 4


def test_a_captured_graph_computes_the_same() -> None:
    stream = torch.cuda.Stream()
    enqueue, out = _work(256, stream)
    graph = capture_graph(enqueue, stream)
    expected = out.clone()
    out.zero_()
    torch.cuda.synchronize()
    times = time_on_stream(graph.replay, stream, 1, 3)
    torch.testing.assert_close(out, expected)
    assert all(ms > 0 for ms in times)


def test_work_that_waits_cannot_be_captured() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")

    def waits() -> None:
        with torch.cuda.stream(stream):
            x.add_(1)
        stream.synchronize()

    with pytest.raises(RunnerError, match="CUDA graph"):
        capture_graph(waits, stream)
    # The device still works afterwards, its random numbers included.
    assert float(torch.rand(2, device="cuda").sum()) > 0.0
    assert capture_graph(_work(64, stream)[0], stream) is not None


def test_streams_run_together() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    work = [(_work(1024, stream)[0], stream) for stream in streams]
    times, wall = time_streams(work, warmup=2, iterations=5)
    assert len(times) == 10 and 0 < wall * 1000 <= sum(times) * 1.5


def test_torch_is_timed_with_and_without_copies() -> None:
    runner = TorchRunner(torch.nn.Linear(2048, 8), device="cuda")
    inputs = {"input": np.zeros((4096, 2048), np.float32)}
    execution, with_copies = measure_torch(runner, inputs, warmup=2, iterations=10)
    assert execution.batch == 4096 and 0 < execution.median_ms < with_copies.median_ms
