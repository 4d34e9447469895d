"""Time of each layer, through IProfiler.

Never run with TensorRT itself: no GPU that the library supports was at hand. Run on an NVIDIA H200 with a stand-in
for the engine (tests/tensorrt/test_engine_runner.py); the calls were checked against the bindings of tensorrt 10.16
and 11.4 and of tensorrt_rtx 1.7 (tests/tensorrt/test_api_presence.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qat.runtime.runner import Array
from qat.tensorrt.api import Library
from qat.tensorrt.runner import TensorRTRunner


@dataclass(frozen=True)
class LayerTime:
    """Mean time of a layer in milliseconds, and its percentage of all layers."""

    layer: str
    mean_ms: float
    percent: float


class TimeCollector:
    """Sums the times of each layer over several runs, in the order of execution."""

    def __init__(self) -> None:
        self.total_ms: dict[str, float] = {}

    def add(self, layer: str, ms: float) -> None:
        """One layer of one run."""
        self.total_ms[layer] = self.total_ms.get(layer, 0.0) + ms

    def layer_times(self, runs: int) -> list[LayerTime]:
        """Means over `runs` runs."""
        whole = sum(self.total_ms.values()) or 1.0
        return [LayerTime(name, ms / max(runs, 1), 100 * ms / whole) for name, ms in self.total_ms.items()]


def make_profiler(library: Library, collector: TimeCollector) -> Any:
    """An IProfiler that reports to `collector`; the caller keeps it alive."""
    trt: Any = library.trt

    class _Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            collector.add(layer_name, ms)

    return _Profiler()


def profile_layers(
    runner: TensorRTRunner, inputs: Mapping[str, Array], warmup: int = 5, iterations: int = 50
) -> list[LayerTime]:
    """Time every layer. The sum exceeds the plain execution time, since a profiler keeps layers from overlapping.

    Raises:
        RunnerError: the inputs do not fit the engine, or the runner replays CUDA graphs.
        EngineError: TensorRT fails.
    """
    for _ in range(warmup):
        runner.run(inputs)
    collector = TimeCollector()
    runner.use_profiler(make_profiler(runner.library, collector))
    for _ in range(iterations):
        runner.run(inputs)
    runner.use_profiler(make_profiler(runner.library, TimeCollector()))
    return collector.layer_times(iterations)
