"""TensorRTRunner with a stand-in for TensorRT: an engine that copies its input to its output.

The stand-in has the methods of the bindings that the runner uses (test_api_presence checks that those exist), reads
and writes the addresses it is given, and runs on the stream it is given. On a machine without a GPU host memory stands
in for the GPU's as well: what is checked there is the order of the calls and the handling of shapes.
"""

import contextlib
import ctypes
import enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qat.errors import EngineError, RunnerError
from qat.tensorrt import runner as runner_module
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


class _HostStream:
    cuda_stream = 0

    def synchronize(self) -> None:
        pass


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request, monkeypatch) -> str:
    """Where the stand-in runs."""
    if request.param == "host":
        empty = torch.empty

        def on_host(*size, pin_memory: bool = False, device: str = "cpu", **options) -> torch.Tensor:
            return empty(*size, **options)

        monkeypatch.setattr(torch, "empty", on_host)
        monkeypatch.setattr(torch.cuda, "Stream", _HostStream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(runner_module, "capture_graph", _capture)
        monkeypatch.setattr(_Context, "on_host", True)
    return request.param


def _capture(enqueue, stream) -> SimpleNamespace:
    enqueue()
    return SimpleNamespace(replay=enqueue)


class _Interface:
    def __init__(self) -> None:
        pass


TRT = SimpleNamespace(TensorLocation=_Location, TensorIOMode=_Mode, IOutputAllocator=_Interface, IProfiler=_Interface)


class _Context:
    on_host = False
    takes_addresses = True

    def __init__(self, engine: "_Engine") -> None:
        self.engine, self.active_optimization_profile, self.profiler = engine, 0, None
        self.shape, self.addresses, self.allocators, self.switches = (), {}, {}, 0
        self.read: list[bytes] = []

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.active_optimization_profile, self.switches = profile, self.switches + 1
        return True

    def set_input_shape(self, name: str, shape: tuple) -> bool:
        low, _, high = self.engine.profiles[self.active_optimization_profile]
        self.shape = shape
        return all(lo <= size <= hi for lo, size, hi in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self.addresses[name] = address
        return self.takes_addresses

    def set_output_allocator(self, name: str, allocator: object) -> bool:
        self.allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple:
        return (-1, 4) if self.engine.data_dependent else self.shape

    def execute_async_v3(self, stream: int) -> bool:
        rows = self.shape[0] // 2 if self.engine.data_dependent else 0
        count = rows * 4 if self.engine.data_dependent else int(np.prod(self.shape))
        size = count * self.engine.dtype_size
        target = self.addresses.get("y")
        if self.engine.data_dependent:
            target = self.allocators["y"].reallocate_output_async("y", 0, size, 256, stream)
            self.allocators["y"].notify_shape("y", (rows, 4))
        if self.profiler is not None:
            self.profiler.report_layer_time("copy", 0.5)
        if self.on_host:
            self.read.append(ctypes.string_at(self.addresses["x"], size))
            ctypes.memmove(target, self.addresses["x"], size)
            return True
        copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
        copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        return copy(target, self.addresses["x"], size, stream) == 0


class _Engine:
    num_io_tensors = 2

    def __init__(self, dtype: _Type = _Type.FLOAT, data_dependent: bool = False, scalar: bool = False) -> None:
        self.dtype, self.data_dependent, self.scalar = dtype, data_dependent, scalar
        self.profiles = [((), (), ())] if scalar else PROFILES
        self.num_optimization_profiles = len(self.profiles)
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
        return () if self.scalar else (-1, 4)

    def get_tensor_profile_shape(self, name: str, index: int) -> list:
        return [list(shape) for shape in self.profiles[index]]

    def create_execution_context(self) -> _Context:
        return _Context(self)


def _loaded(**options) -> LoadedEngine:
    return LoadedEngine(Library("tensorrt", "11.0", TRT, LogHub()), _Engine(**options), None, Path("copy.engine"))


def _batch(rows: int, seed: int = 0) -> dict:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)}


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_shapes_and_profiles_change_between_runs(cuda_graph, machine) -> None:
    runner = TensorRTRunner(_loaded(), cuda_graph=cuda_graph)
    assert (runner.input_names, runner.output_names) == (["x"], ["y"])
    for seed, rows in enumerate((1, 8, 8, 3, 16, 1, 16)):
        batch = _batch(rows, seed)
        np.testing.assert_array_equal(runner.run(batch)["y"], batch["x"])
    assert runner.context.active_optimization_profile == 1 and runner.context.switches == 3


def test_results_are_copies(machine) -> None:
    runner = TensorRTRunner(_loaded())
    first = runner.run(_batch(4, 1))["y"]
    runner.run(_batch(4, 2))
    np.testing.assert_array_equal(first, _batch(4, 1)["x"])


def test_refused_shapes_leave_the_runner_usable(machine) -> None:
    runner = TensorRTRunner(_loaded())
    runner.run(_batch(8))
    with pytest.raises(RunnerError, match="x 17x4"):
        runner.run(_batch(17))
    np.testing.assert_array_equal(runner.run(_batch(8))["y"], _batch(8)["x"])


def test_data_dependent_outputs_come_through_the_allocator(machine) -> None:
    runner = TensorRTRunner(_loaded(data_dependent=True), cuda_graph=True)
    for rows in (4, 16, 2):
        np.testing.assert_array_equal(runner.run(_batch(rows))["y"], _batch(rows)["x"][: rows // 2])


def test_bfloat16_appears_as_float32(machine) -> None:
    result = TensorRTRunner(_loaded(dtype=_Type.BF16)).run(_batch(4))["y"]
    expected = torch.from_numpy(_batch(4)["x"]).bfloat16().float().numpy()
    np.testing.assert_array_equal(result, expected)


def test_half_wants_half(machine) -> None:
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


def test_layers_are_timed(machine) -> None:
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


def test_a_graph_is_captured_from_real_inputs(machine) -> None:
    """The run before a capture would otherwise read whatever is in new memory, as indices perhaps."""
    runner = TensorRTRunner(_loaded(), cuda_graph=True)
    runner.run(_batch(8))
    if machine == "host":
        assert runner.context.read and set(runner.context.read) == {_batch(8)["x"].tobytes()}


def test_scalar_inputs_have_memory(machine) -> None:
    runner = TensorRTRunner(_loaded(scalar=True))
    for value in (1.5, 2.5):
        result = runner.run({"x": np.array(value, np.float32)})["y"]
        assert result.shape == () and result == value


def test_inputs_need_not_be_contiguous_or_writable(machine) -> None:
    x = np.asfortranarray(_batch(8)["x"])
    x.flags.writeable = False
    np.testing.assert_array_equal(TensorRTRunner(_loaded()).run({"x": x})["y"], x)


def test_what_tensorrt_refuses_is_an_error(machine, monkeypatch) -> None:
    monkeypatch.setattr(_Context, "takes_addresses", False)
    with pytest.raises(EngineError, match="memory of tensor 'x'"):
        TensorRTRunner(_loaded()).run(_batch(4))
    monkeypatch.setattr(_Context, "takes_addresses", True)

    def infer_shapes(self) -> list[str]:
        raise RuntimeError("shape inference failed")

    monkeypatch.setattr(_Context, "infer_shapes", infer_shapes)
    with pytest.raises(EngineError, match="shape inference failed"):
        TensorRTRunner(_loaded()).run(_batch(4))


class _Streaming(_Engine):
    """Takes a budget between 0 and the weights' size; TensorRT's setter ignores others without a word."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.streamable_weights_size = self._budget = size

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        self._budget = min(budget, self.streamable_weights_size) if budget >= 0 else self._budget


def test_a_weight_streaming_budget_is_set_or_refused(machine) -> None:
    def runner(size: int, budget: int) -> TensorRTRunner:
        loaded = LoadedEngine(Library("tensorrt", "11.0", TRT, LogHub()), _Streaming(size), None, Path("w.engine"))
        return TensorRTRunner(loaded, weight_streaming_budget=budget)

    assert runner(1000, 200).loaded.engine.weight_streaming_budget_v2 == 200
    assert runner(1000, 5000).loaded.engine.weight_streaming_budget_v2 == 1000
    with pytest.raises(EngineError, match="-1 bytes"):
        runner(1000, -1)
    with pytest.raises(EngineError, match="--allowWeightStreaming"):
        runner(0, 200)
