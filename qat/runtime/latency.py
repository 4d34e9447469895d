"""Latency and throughput: one set of statistics for every runner, and a sweep over batch sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qat.errors import QatError, RunnerError
from qat.files import atomic_write
from qat.runtime.runner import Array, Runner


@dataclass(frozen=True)
class Latency:
    """Time of one batch in milliseconds, over `count` runs, and samples a second."""

    batch: int
    count: int
    mean_ms: float
    median_ms: float
    p95_ms: float
    p99_ms: float
    min_ms: float
    throughput: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def summarize(times_ms: Sequence[float], batch: int, wall_seconds: float | None = None) -> Latency:
    """Statistics of measured times.

    Args:
        times_ms: one value a run.
        batch: samples a run.
        wall_seconds: time from first start to last end, where runs overlap (several streams); without it
            throughput is batch / mean.

    Raises:
        RunnerError: no measurement.
    """
    if not times_ms:
        raise RunnerError("Nothing was measured: ask for at least one iteration.")
    values = np.asarray(times_ms, dtype=np.float64)
    seconds = wall_seconds if wall_seconds is not None else float(values.sum()) / 1000
    p50, p95, p99 = (float(p) for p in np.percentile(values, [50, 95, 99]))
    return Latency(
        batch=batch,
        count=len(values),
        mean_ms=float(values.mean()),
        median_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        min_ms=float(values.min()),
        throughput=batch * len(values) / max(seconds, 1e-12),
    )


def measure_runner(runner: Runner, inputs: Mapping[str, Array], warmup: int = 10, iterations: int = 100) -> Latency:
    """Wall-clock time of `runner.run`, copies included; the baseline on ONNX Runtime and torch.

    Raises:
        RunnerError: the runner refuses the inputs, or iterations is 0.
    """
    for _ in range(warmup):
        runner.run(inputs)
    times = []
    for _ in range(iterations):
        started = time.perf_counter()
        runner.run(inputs)
        times.append((time.perf_counter() - started) * 1000)
    return summarize(times, batch_of(inputs))


def batch_of(inputs: Mapping[str, Array]) -> int:
    """Dimension 0 of the first input; 1 for a scalar."""
    shape = next(iter(inputs.values())).shape
    return int(shape[0]) if shape else 1


@dataclass(frozen=True)
class SweepPoint:
    """One batch size of a sweep: a latency, or the reason why there is none."""

    batch: int
    latency: Latency | None
    reason: str = ""


def sweep_batches(measure: Callable[[int], Latency], batches: Sequence[int]) -> list[SweepPoint]:
    """Measure each batch size; one that cannot run (out of memory, outside the profiles) keeps its reason."""
    points = []
    for batch in batches:
        try:
            points.append(SweepPoint(batch, measure(batch)))
        except (QatError, MemoryError, RuntimeError) as error:
            points.append(SweepPoint(batch, None, str(error).splitlines()[0] if str(error) else repr(error)))
    return points


def plot_sweep(path: str | Path, curves: Mapping[str, Sequence[SweepPoint]], title: str = "") -> None:
    """PNG with median latency and throughput over the batch size, one curve a name.

    Raises:
        OSError: the folder cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        measured = [(point.batch, point.latency) for point in points if point.latency is not None]
        batches = [batch for batch, _ in measured]
        left.plot(batches, [latency.median_ms for _, latency in measured], marker="o", label=name)
        right.plot(batches, [latency.throughput for _, latency in measured], marker="o", label=name)
    left.set_ylabel("median latency of a batch, ms")
    right.set_ylabel("samples / s")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch size")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
