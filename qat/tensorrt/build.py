"""Building an engine from an ONNX file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.errors import EngineError
from qat.tensorrt.advice import build_advice
from qat.tensorrt.api import Library, load_library
from qat.tensorrt.layers import Layer
from qat.tensorrt.lint_advice import LinterAdvice, refuse_lethal
from qat.tensorrt.log import LogRecorder
from qat.tensorrt.log_listing import layers_from_log
from qat.tensorrt.options import BuildOptions, apply_options
from qat.tensorrt.parse import load_onnx_graph, network_inputs, parse_onnx
from qat.tensorrt.profiles import NetworkInput, Profile, check_profiles
from qat.tensorrt.progress import BuildControl, make_monitor, run_cancellable
from qat.tensorrt.timing_cache import attach_timing_cache, store_timing_cache


@dataclass(frozen=True)
class BuildResult:
    """A serialized engine, its layers where the build log lists them (RTX), and the seconds it took."""

    engine: bytes
    layers: tuple[Layer, ...]
    log: tuple[str, ...]
    seconds: float


def build_engine(
    onnx_path: str | Path,
    options: BuildOptions | None = None,
    *,
    library: Library | None = None,
    timing_cache: str | Path | None = None,
    show_progress: bool = False,
    control: BuildControl | None = None,
) -> BuildResult:
    """Build a strongly typed engine: every tensor has the type that the file gives it.

    Args:
        onnx_path: the file; external data beside it is found.
        options: what to build.
        library: TensorRT; the first installed one by default.
        timing_cache: measured tactics to reuse and extend; see `cache_path` for the file's name.
        show_progress: a bar for each phase.
        control: progress and cancellation; made here unless given.

    Raises:
        EngineError: no TensorRT, an unreadable or refused file, profiles that do not fit, or a failed build.
        KeyboardInterrupt: Ctrl-C, after the build has stopped.
    """
    library = library or load_library()
    options = options or BuildOptions()
    control = control or BuildControl(show_progress)
    refuse_lethal(onnx_path, load_onnx_graph(onnx_path))
    started = time.perf_counter()
    with library.log.record() as recorder:
        builder = library.create_builder()
        network = library.create_network(builder)
        parser = parse_onnx(library, network, onnx_path)
        config = builder.create_builder_config()
        inputs = network_inputs(network)
        check_profiles(inputs, options.profiles)
        for profile in options.profiles:
            _add_profile(builder, config, profile, inputs)
        apply_options(library, config, options)
        # The configuration does not own the monitor: this reference keeps it alive during the build.
        monitor = make_monitor(library, control)
        config.progress_monitor = monitor
        cached = timing_cache is not None and attach_timing_cache(library, config, timing_cache)
        plan = run_cancellable(lambda: builder.build_serialized_network(network, config), control)
        if plan is None:
            raise EngineError(_failure(library, onnx_path, recorder))
        if timing_cache is not None and cached:
            store_timing_cache(library, config, timing_cache)
        engine = bytes(plan)
        del monitor, parser
    messages = recorder.messages
    return BuildResult(engine, tuple(layers_from_log(messages)), tuple(messages), time.perf_counter() - started)


def _add_profile(builder: Any, config: Any, profile: Profile, inputs: list[NetworkInput]) -> None:
    shape_tensors = {item.name for item in inputs if item.is_shape_tensor}
    trt_profile = builder.create_optimization_profile()
    for name, shapes in profile.items():
        setter = trt_profile.set_shape_input if name in shape_tensors else trt_profile.set_shape
        try:
            setter(name, shapes.min, shapes.opt, shapes.max)
        except ValueError as error:
            raise EngineError(f"TensorRT refuses the shapes of '{name}' in a profile: {error}") from error
    if config.add_optimization_profile(trt_profile) < 0:
        raise EngineError(f"TensorRT refuses the optimization profile {dict(profile)}.")


def _failure(library: Library, path: str | Path, recorder: LogRecorder) -> str:
    errors = list(dict.fromkeys(recorder.errors))
    linter = LinterAdvice(path)
    advice = build_advice(errors)
    found = [advice] if advice else linter.about("", " ".join(errors)) or linter.errors()
    lines = [f"- {message}" for message in errors] or ["- no reason was logged"]
    return "\n".join([f"{library.name} {library.version} cannot build an engine from '{path}':", *lines, *found])
