"""Measuring an engine: execution alone, with copies, as a CUDA graph, on several streams.

Never run with TensorRT itself: no GPU that the library supports was at hand. Run on an NVIDIA H200 with a stand-in
for the engine (tests/tensorrt/test_engine_runner.py); the calls were checked against the bindings of tensorrt 10.16
and 11.4 and of tensorrt_rtx 1.7 (tests/tensorrt/test_api_presence.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qat.errors import RunnerError
from qat.runtime.cuda_timing import capture_graph, time_on_stream, time_streams
from qat.runtime.latency import Latency, batch_of, summarize
from qat.runtime.runner import Array
from qat.tensorrt.engine import LoadedEngine
from qat.tensorrt.runner import TensorRTRunner


@dataclass(frozen=True)
class EngineTiming:
    """What one engine takes for one batch. A part that cannot be measured is None, with its reason in `notes`."""

    execution: Latency
    with_copies: Latency
    cuda_graph: Latency | None
    streams: Latency | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        parts = {name: getattr(self, name) for name in ("execution", "with_copies", "cuda_graph", "streams")}
        return {name: part.to_dict() if part else None for name, part in parts.items()} | {"notes": list(self.notes)}


def measure_engine(
    loaded: LoadedEngine,
    inputs: Mapping[str, Array],
    warmup: int = 20,
    iterations: int = 200,
    cuda_graph: bool = True,
    streams: int = 1,
) -> EngineTiming:
    """Measure with CUDA events.

    Args:
        loaded: the engine.
        inputs: one batch.
        warmup: runs before those that count.
        iterations: runs that count, in each part.
        cuda_graph: also measure the replay of a captured graph.
        streams: for more than 1, also measure so many execution contexts at once; throughput is of all together.

    Raises:
        RunnerError: the inputs do not fit the engine.
        EngineError: TensorRT fails.
    """
    runner, batch = TensorRTRunner(loaded), batch_of(inputs)
    runner.prepare(inputs)
    runner.run(inputs)
    notes: list[str] = []
    execution = summarize(time_on_stream(runner.execute, runner.stream, warmup, iterations), batch)

    def with_copies() -> None:
        runner.upload()
        runner.execute()
        runner.download()

    copies = summarize(time_on_stream(with_copies, runner.stream, warmup, iterations), batch)
    graphed = None
    if cuda_graph:
        try:
            graph = capture_graph(runner.execute, runner.stream)
            graphed = summarize(time_on_stream(graph.replay, runner.stream, warmup, iterations), batch)
        except RunnerError as error:
            notes.append(str(error))
    parallel = _measure_streams(loaded, inputs, warmup, iterations, streams) if streams > 1 else None
    return EngineTiming(execution, copies, graphed, parallel, tuple(notes))


def _measure_streams(
    loaded: LoadedEngine, inputs: Mapping[str, Array], warmup: int, iterations: int, streams: int
) -> Latency:
    runners = [TensorRTRunner(loaded) for _ in range(streams)]
    for runner in runners:
        runner.run(inputs)
    times, wall = time_streams([(runner.execute, runner.stream) for runner in runners], warmup, iterations)
    return summarize(times, batch_of(inputs), wall_seconds=wall)
