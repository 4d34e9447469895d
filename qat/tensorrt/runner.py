"""TensorRTRunner: executes an engine on a CUDA stream, with dynamic shapes through its profiles.

Never run with TensorRT itself: no GPU that the library supports was at hand. Run on an NVIDIA H200 with a stand-in
for the engine (tests/tensorrt/test_engine_runner.py); the calls were checked against the bindings of tensorrt 10.16
and 11.4 and of tensorrt_rtx 1.7 (tests/tensorrt/test_api_presence.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qat.errors import EngineError, RunnerError
from qat.runtime.cuda_timing import capture_graph
from qat.runtime.runner import Array, Arrays, TensorSpec, check_inputs
from qat.tensorrt.api import Library
from qat.tensorrt.context import create_context, stream_weights
from qat.tensorrt.engine import LoadedEngine, load_engine
from qat.tensorrt.memory import DynamicOutput, TensorBuffer, make_output_allocator, numpy_type, torch_type
from qat.tensorrt.profiles import Profile, ShapeRange, choose_profile, show

Shapes = dict[str, tuple[int, ...]]


class TensorRTRunner:
    """Runs one engine in one execution context on its own stream; not safe for several threads, make one for each.

    Args:
        engine: a file, or an engine loaded before, so that several runners share its weights.
        library: TensorRT, if `engine` is a file.
        cuda_graph: capture each new set of shapes as a CUDA graph and replay it.
        weight_streaming_budget: bytes of weights kept on the GPU, for an engine built with weight_streaming; None
            keeps them all there, so that nothing is streamed.

    Raises:
        EngineError: the engine cannot be loaded, or has no memory to run.
    """

    def __init__(
        self,
        engine: str | Path | LoadedEngine,
        library: Library | None = None,
        cuda_graph: bool = False,
        weight_streaming_budget: int | None = None,
    ) -> None:
        self.loaded = engine if isinstance(engine, LoadedEngine) else load_engine(engine, library)
        self.library = self.loaded.library
        self.cuda_graph = cuda_graph
        trt_engine = self.loaded.engine
        if weight_streaming_budget is not None:
            stream_weights(self.loaded, weight_streaming_budget)
        self.context = create_context(self.loaded)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._profilers: list[Any] = []
        self._input_names = self.loaded.tensor_names("INPUT")
        self._output_names = self.loaded.tensor_names("OUTPUT")
        self._buffers = {name: self._make_buffer(name) for name in (*self._input_names, *self._output_names)}
        self.inputs = [self._spec(name) for name in self._input_names]
        self.profiles = [self._profile(index) for index in range(trt_engine.num_optimization_profiles)]
        self._dynamic: dict[str, DynamicOutput] = {}
        self._allocators: dict[str, Any] = {}
        self._shapes: Shapes = {}
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def input_names(self) -> list[str]:
        """The engine's inputs, in order."""
        return list(self._input_names)

    @property
    def output_names(self) -> list[str]:
        """The engine's outputs, in order."""
        return list(self._output_names)

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Copy in, execute and copy out on the stream, and wait.

        Raises:
            RunnerError: names, types or shapes do not fit, or no profile accepts the shapes.
            EngineError: TensorRT fails.
        """
        self.prepare(inputs)
        with torch.cuda.stream(self.stream):
            self.upload()
            self.execute()
            self.download()
        self.stream.synchronize()
        return self._collect()

    def prepare(self, inputs: Mapping[str, Array]) -> None:
        """Bind shapes and memory for `inputs` and put them into pinned memory; cheap while shapes stay the same."""
        check_inputs(inputs, self.inputs)
        shapes: Shapes = {name: inputs[name].shape for name in self._input_names}
        hosted = [name for name in self._input_names if self._buffers[name].on_host]
        for name in self._input_names:
            if self._shapes.get(name) != shapes[name]:
                self.stream.synchronize()
                self._buffers[name].resize(shapes[name])
            self._buffers[name].fill(inputs[name])
        # The values of shape tensors change the output shapes, so they bind anew every time.
        if shapes != self._shapes or hosted:
            self._bind(shapes)

    def execute(self) -> None:
        """Enqueue one execution on the stream and return without waiting; `prepare` comes first."""
        if self._graph is not None:
            with torch.cuda.stream(self.stream):
                self._graph.replay()
        else:
            self._enqueue()

    def upload(self) -> None:
        """Enqueue the copies to the device on the current stream."""
        for name in self._input_names:
            self._buffers[name].upload()

    def download(self) -> None:
        """Enqueue the copies to the host on the current stream; data-dependent outputs follow in `run`."""
        for name in self._output_names:
            if name not in self._dynamic:
                self._buffers[name].download()

    def use_profiler(self, profiler: Any) -> None:
        """Report layer times to an IProfiler; it is kept alive, because TensorRT holds a plain pointer.

        Raises:
            RunnerError: the runner replays CUDA graphs, which report nothing.
        """
        if self.cuda_graph:
            raise RunnerError(
                "Layers cannot be timed while replaying a CUDA graph: make the runner without cuda_graph."
            )
        self._profilers.append(profiler)
        self.context.profiler = profiler

    def _bind(self, shapes: Shapes) -> None:
        self.stream.synchronize()
        self._graph, self._shapes = None, {}
        context = self.context
        moving: Shapes = {n: s for n, s in shapes.items() if not self._buffers[n].on_host}
        profile = choose_profile(self.profiles, moving)
        if context.active_optimization_profile != profile:
            if not context.set_optimization_profile_async(profile, self.stream.cuda_stream):
                raise EngineError(f"TensorRT refuses optimization profile {profile}.")
            self.stream.synchronize()
        for name, shape in moving.items():
            if not context.set_input_shape(name, shape):
                raise RunnerError(f"TensorRT refuses the shape {show(shape)} of input '{name}'.")
        for name in self._input_names:
            self._set_address(name)
        try:
            missing = context.infer_shapes()
        except RuntimeError as error:
            raise EngineError(f"TensorRT cannot infer the output shapes for {shapes}: {error}") from error
        if missing:
            raise EngineError(f"TensorRT cannot infer shapes: {list(missing)} are not specified.")
        for name in self._output_names:
            self._bind_output(name)
        self._shapes = shapes
        if self.cuda_graph and not self._dynamic:
            # The run before the capture must read real inputs: an index out of range would be a memory fault.
            with torch.cuda.stream(self.stream):
                self.upload()
            self._graph = capture_graph(self._enqueue, self.stream)

    def _bind_output(self, name: str) -> None:
        shape = tuple(self.context.get_tensor_shape(name))
        if -1 not in shape:
            if self._dynamic.pop(name, None) is not None:
                self.context.set_output_allocator(name, None)
            self._buffers[name].resize(shape)
            self._set_address(name)
        elif name not in self._dynamic:
            self._dynamic[name] = DynamicOutput(name, self._buffers[name].dtype)
            self._allocators[name] = make_output_allocator(self.library, self._dynamic[name])
            if not self.context.set_output_allocator(name, self._allocators[name]):
                raise EngineError(f"TensorRT refuses an output allocator for '{name}'.")

    def _set_address(self, name: str) -> None:
        if not self.context.set_tensor_address(name, self._buffers[name].address):
            raise EngineError(f"TensorRT refuses the memory of tensor '{name}'.")

    def _enqueue(self) -> None:
        if not self.context.execute_async_v3(self.stream.cuda_stream):
            raise EngineError(f"Executing '{self.loaded.path}' failed; TensorRT's log says why (logger qat.tensorrt).")

    def _collect(self) -> Arrays:
        return {
            name: (self._dynamic[name] if name in self._dynamic else self._buffers[name]).array()
            for name in self._output_names
        }

    def _make_buffer(self, name: str) -> TensorBuffer:
        engine = self.loaded.engine
        host = engine.get_tensor_location(name) == self.library.trt.TensorLocation.HOST
        return TensorBuffer(name, torch_type(name, engine.get_tensor_dtype(name)), on_host=host)

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(None if size == -1 else int(size) for size in self.loaded.engine.get_tensor_shape(name))
        return TensorSpec(name, numpy_type(self._buffers[name].dtype), shape)

    def _profile(self, index: int) -> Profile:
        names = [name for name in self._input_names if not self._buffers[name].on_host]
        bounds = {name: self.loaded.engine.get_tensor_profile_shape(name, index) for name in names}
        return {name: ShapeRange(*(tuple(dims) for dims in three)) for name, three in bounds.items()}
