"""TensorRTRunner on a real GPU with a stand-in for TensorRT: an engine that copies its input to its output.

The stand-in has the methods of the bindings that the runner uses (test_api_presence checks that those exist), reads
and writes the addresses it is given, and runs on the stream it is given.
"""

import ctypes
import enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qat.errors import RunnerError
from qat.tensorrt.api import Library
from qat.tensorrt.benchmark import measure_engine
from qat.tensorrt.engine import LoadedEngine
from qat.tensorrt.layer_profile import TimeCollector, profile_layers
from qat.tensorrt.log import LogHub
from qat.tensorrt.runner import TensorRTRunner

PROFILES = [((1, 4), (1, 4), (1, 4)), ((1, 4), (8, 4), (16, 4))]


class _Location(enum.Enum):
    DEVICE = 1
    HOST = 2


class _Mode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class _Type(enum.Enum):
    FLOAT = 1
    HALF = 2
    BF16 = 3


class _Interface:
    def __init__(self) -> None:
        pass


TRT = SimpleNamespace(TensorLocation=_Location, TensorIOMode=_Mode, IOutputAllocator=_Interface, IProfiler=_Interface)


class _Context:
    def __init__(self, engine: "_Engine") -> None:
        self.engine, self.active_optimization_profile, self.profiler = engine, 0, None
        self.shape, self.addresses, self.allocators, self.switches = (), {}, {}, 0
        self.driver = ctypes.CDLL("libcuda.so.1")

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.active_optimization_profile, self.switches = profile, self.switches + 1
        return True

    def set_input_shape(self, name: str, shape: tuple) -> bool:
        low, _, high = PROFILES[self.active_optimization_profile]
        self.shape = shape
        return all(lo <= size <= hi for lo, size, hi in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self.addresses[name] = address
        return True

    def set_output_allocator(self, name: str, allocator: object) -> bool:
        self.allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple:
        return (-1, 4) if self.engine.data_dependent else self.shape

    def execute_async_v3(self, stream: int) -> bool:
        rows = self.shape[0] // 2 if self.engine.data_dependent else self.shape[0]
        size = rows * 4 * self.engine.dtype_size
        target = self.addresses.get("y")
        if self.engine.data_dependent:
            target = self.allocators["y"].reallocate_output_async("y", 0, size, 256, stream)
            self.allocators["y"].notify_shape("y", (rows, 4))
        if self.profiler is not None:
            self.profiler.report_layer_time("copy", 0.5)
        copy = self.driver.cuMemcpyDtoDAsync_v2
        copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        return copy(target, self.addresses["x"], size, stream) == 0


class _Engine:
    num_io_tensors, num_optimization_profiles = 2, len(PROFILES)

    def __init__(self, dtype: _Type = _Type.FLOAT, data_dependent: bool = False) -> None:
        self.dtype, self.data_dependent = dtype, data_dependent
        self.dtype_size = 4 if dtype is _Type.FLOAT else 2

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> _Mode:
        return _Mode.INPUT if name == "x" else _Mode.OUTPUT

    def get_tensor_location(self, name: str) -> _Location:
        return _Location.DEVICE

    def get_tensor_dtype(self, name: str) -> _Type:
        return self.dtype

    def get_tensor_shape(self, name: str) -> tuple:
        return (-1, 4)

    def get_tensor_profile_shape(self, name: str, index: int) -> list:
        return [list(shape) for shape in PROFILES[index]]

    def create_execution_context(self) -> _Context:
        return _Context(self)


def _loaded(**options) -> LoadedEngine:
    return LoadedEngine(Library("tensorrt", "11.0", TRT, LogHub()), _Engine(**options), None, Path("copy.engine"))


def _batch(rows: int, seed: int = 0) -> dict:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)}


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_shapes_and_profiles_change_between_runs(cuda_graph) -> None:
    runner = TensorRTRunner(_loaded(), cuda_graph=cuda_graph)
    assert (runner.input_names, runner.output_names) == (["x"], ["y"])
    for seed, rows in enumerate((1, 8, 8, 3, 16, 1, 16)):
        batch = _batch(rows, seed)
        np.testing.assert_array_equal(runner.run(batch)["y"], batch["x"])
    assert runner.context.active_optimization_profile == 1 and runner.context.switches == 3


@pytest.mark.gpu
def test_results_are_copies() -> None:
    runner = TensorRTRunner(_loaded())
    first = runner.run(_batch(4, 1))["y"]
    runner.run(_batch(4, 2))
    np.testing.assert_array_equal(first, _batch(4, 1)["x"])


@pytest.mark.gpu
def test_refused_shapes_leave_the_runner_usable() -> None:
    runner = TensorRTRunner(_loaded())
    runner.run(_batch(8))
    with pytest.raises(RunnerError, match="x 17x4"):
        runner.run(_batch(17))
    np.testing.assert_array_equal(runner.run(_batch(8))["y"], _batch(8)["x"])


@pytest.mark.gpu
def test_data_dependent_outputs_come_through_the_allocator() -> None:
    runner = TensorRTRunner(_loaded(data_dependent=True), cuda_graph=True)
    for rows in (4, 16, 2):
        np.testing.assert_array_equal(runner.run(_batch(rows))["y"], _batch(rows)["x"][: rows // 2])


@pytest.mark.gpu
def test_bfloat16_appears_as_float32() -> None:
    result = TensorRTRunner(_loaded(dtype=_Type.BF16)).run(_batch(4))["y"]
    expected = torch.from_numpy(_batch(4)["x"]).bfloat16().float().numpy()
    np.testing.assert_array_equal(result, expected)


@pytest.mark.gpu
def test_half_wants_half() -> None:
    runner = TensorRTRunner(_loaded(dtype=_Type.HALF))
    with pytest.raises(RunnerError, match="float16"):
        runner.run(_batch(4))
    half = {"x": _batch(4)["x"].astype(np.float16)}
    np.testing.assert_array_equal(runner.run(half)["y"], half["x"])


@pytest.mark.gpu
def test_measurement_reports_every_part() -> None:
    timing = measure_engine(_loaded(), _batch(8), warmup=2, iterations=10, cuda_graph=True, streams=2)
    assert timing.notes == () and timing.cuda_graph and timing.streams
    assert timing.streams.count == 20 and timing.execution.batch == 8
    assert timing.with_copies.median_ms > timing.execution.median_ms
    assert timing.to_dict()["execution"]["median_ms"] > 0


@pytest.mark.gpu
def test_layers_are_timed() -> None:
    runner = TensorRTRunner(_loaded())
    (layer,) = profile_layers(runner, _batch(4), warmup=1, iterations=4)
    assert (layer.layer, layer.mean_ms, layer.percent) == ("copy", 0.5, 100.0)
    with pytest.raises(RunnerError, match="CUDA graph"):
        profile_layers(TensorRTRunner(_loaded(), cuda_graph=True), _batch(4))


def test_layer_times_are_means_and_shares() -> None:
    collector = TimeCollector()
    for _ in range(2):
        collector.add("a", 3.0)
        collector.add("b", 1.0)
    times = collector.layer_times(runs=2)
    assert [(t.layer, t.mean_ms, t.percent) for t in times] == [("a", 3.0, 75.0), ("b", 1.0, 25.0)]
