"""Timing work on CUDA streams with events, plain and as a captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qat.errors import RunnerError

Enqueue = Callable[[], object]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_on_stream(enqueue: Enqueue, stream: torch.cuda.Stream, warmup: int, iterations: int) -> list[float]:
    """GPU time of each call in milliseconds, between events on `stream`.

    The host runs ahead of the GPU, so that launch overhead shows only where it exceeds the work.

    Args:
        enqueue: puts one run's work on `stream` and returns without waiting.
        stream: not the default stream.
        warmup: runs before the first that counts.
        iterations: runs that count.
    """
    starts = [_event() for _ in range(iterations)]
    ends = [_event() for _ in range(iterations)]
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            enqueue()
        stream.synchronize()
        for start, end in zip(starts, ends, strict=True):
            start.record(stream)
            enqueue()
            end.record(stream)
    stream.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def capture_graph(enqueue: Enqueue, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Capture one run as a CUDA graph; replay it with `graph.replay()` on the same stream.

    The work runs once before the capture, because lazy allocations and shape changes cannot be captured.

    Raises:
        RunnerError: the work cannot be captured: it synchronizes, allocates, or depends on data on the host.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            enqueue()
        stream.synchronize()
        # TensorRT may use other threads; only this one's calls have to be capturable.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            enqueue()
    except RuntimeError as error:
        _end_capture_state(stream)
        raise RunnerError(f"This model cannot be captured as a CUDA graph: {error}. Measure without.") from error
    return graph


def _end_capture_state(stream: torch.cuda.Stream) -> None:
    """Capture something that works: a failed capture leaves torch's generator refusing random numbers until then."""
    number = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        number.add_(1)


def time_streams(
    work: Sequence[tuple[Enqueue, torch.cuda.Stream]], warmup: int, iterations: int
) -> tuple[list[float], float]:
    """Run several streams at once, `iterations` times each, started round-robin from one thread.

    Returns:
        GPU time of every run in milliseconds, and the seconds between the first start and the last end.
    """
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for enqueue, stream in work:
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                enqueue()
    torch.cuda.synchronize()
    for _ in range(iterations):
        for enqueue, stream in work:
            start, end = _event(), _event()
            with torch.cuda.stream(stream):
                start.record(stream)
                enqueue()
                end.record(stream)
            events.append((start, end))
    torch.cuda.synchronize()
    first = events[0][0]
    wall_ms = max(first.elapsed_time(end) for _, end in events)
    return [start.elapsed_time(end) for start, end in events], wall_ms / 1000
