import numpy as np
import pytest

from qat.errors import RunnerError
from qat.runtime.latency import Latency, SweepPoint, batch_of, measure_runner, plot_sweep, summarize, sweep_batches
from qat.runtime.runner import Arrays


def test_statistics_of_known_times() -> None:
    result = summarize([float(ms) for ms in range(1, 101)], batch=4)
    assert (result.count, result.mean_ms, result.median_ms, result.min_ms) == (100, 50.5, 50.5, 1.0)
    assert result.p95_ms == pytest.approx(95.05) and result.p99_ms == pytest.approx(99.01)
    assert result.throughput == pytest.approx(4 / 0.0505)


def test_overlapping_runs_count_by_the_wall_clock() -> None:
    assert summarize([10.0] * 8, batch=2, wall_seconds=0.04).throughput == pytest.approx(400)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(RunnerError):
        summarize([], batch=1)


class _Counter:
    input_names = ["x"]  # noqa: RUF012
    output_names = ["x"]  # noqa: RUF012

    def __init__(self) -> None:
        self.calls = 0

    def run(self, inputs) -> Arrays:
        self.calls += 1
        return dict(inputs)


def test_warm_up_does_not_count() -> None:
    runner = _Counter()
    result = measure_runner(runner, {"x": np.zeros((3, 2))}, warmup=2, iterations=5)
    assert (runner.calls, result.count, result.batch) == (7, 5, 3)
    assert batch_of({"x": np.zeros(())}) == 1


def _latency(batch: int) -> Latency:
    if batch > 4:
        raise RunnerError(f"No profile accepts {batch}.\nDetails")
    return summarize([1.0 * batch], batch)


def test_sweep_keeps_the_reason_and_plots(tmp_path) -> None:
    points = sweep_batches(_latency, [1, 4, 8])
    assert points[2] == SweepPoint(8, None, "No profile accepts 8.")
    assert [point.latency.batch for point in points[:2]] == [1, 4]
    plot_sweep(tmp_path / "sweep.png", {"int8": points, "nothing": points[2:]}, "title")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_mistake_in_the_measurement_is_not_swallowed() -> None:
    with pytest.raises(KeyError):
        sweep_batches(lambda batch: {}[batch], [1])
