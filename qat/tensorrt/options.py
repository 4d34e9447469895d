"""What to build: BuildOptions, and applying them to TensorRT's builder configuration."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from qat.errors import EngineError
from qat.tensorrt.api import Library
from qat.tensorrt.profiles import Profile

logger = logging.getLogger("qat.tensorrt")


@dataclass(frozen=True)
class BuildOptions:
    """Everything that changes the engine; two builds with equal options and equal files are interchangeable.

    Args:
        profiles: optimization profiles, each input name -> ShapeRange; empty for a network without dynamic inputs.
        workspace_bytes: largest scratch memory a layer may use; None leaves TensorRT's default, the GPU's memory.
        optimization_level: 0 (fast build) to 5 (fast engine); None leaves TensorRT's default, 3.
        compute_capabilities: targets such as "8.9", for RTX only; empty targets the current GPU, or where there is
            none every capability that RTX supports.
        hardware_compatibility: a HardwareCompatibilityLevel by name, such as "ampere_plus"; costs speed, since
            only tactics that all those GPUs share are used. Not for RTX: it takes compute_capabilities.
        version_compatible: the engine also runs on later minor versions; costs size (a lean runtime is packed in) and
            some speed. Not for RTX.
        weight_streaming: weights may stay on the host and stream in while running, for models larger than the GPU's
            memory; costs latency whenever the budget is below the weights' size.
        refit: weights can be replaced in the built engine; disables the rewrites that rely on equal scales, so an
            INT8 engine loses fusions. Needs a GPU to build.
        tf32: allow TF32 in float32 layers.
        sparse_weights: use sparse kernels where the weights have the 2:4 pattern.
        max_aux_streams: extra streams TensorRT may use inside the engine; None leaves it to TensorRT.
    """

    profiles: tuple[Profile, ...] = ()
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    compute_capabilities: tuple[str, ...] = ()
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    weight_streaming: bool = False
    refit: bool = False
    tf32: bool = True
    sparse_weights: bool = False
    max_aux_streams: int | None = None

    def __post_init__(self) -> None:
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise EngineError(f"optimization_level is {self.optimization_level}; it goes from 0 to 5.")
        if self.workspace_bytes is not None and self.workspace_bytes <= 0:
            raise EngineError(f"workspace_bytes is {self.workspace_bytes}; it must be positive.")

    def fingerprint(self) -> dict[str, Any]:
        """The options as plain JSON values, for the manifest."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "profiles"}
        values["compute_capabilities"] = list(self.compute_capabilities)
        values["profiles"] = [
            {name: [list(s.min), list(s.opt), list(s.max)] for name, s in sorted(profile.items())}
            for profile in self.profiles
        ]
        return values


def apply_options(library: Library, config: Any, options: BuildOptions) -> None:
    """Set everything but the profiles on an IBuilderConfig.

    Raises:
        EngineError: an option that this library does not have; the message names the alternative.
    """
    trt = library.trt
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.max_aux_streams is not None:
        config.max_aux_streams = options.max_aux_streams
    _apply_target(library, config, options)
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.sparse_weights:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    if options.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if options.refit:
        config.set_flag(trt.BuilderFlag.REFIT)
        logger.warning(
            "refit=True: TensorRT gives up the rewrites that rely on equal scales, so INT8 layers may lose fusions. "
            "Compare the inspection with an engine built without it."
        )


def _apply_target(library: Library, config: Any, options: BuildOptions) -> None:
    trt = library.trt
    level = options.hardware_compatibility.upper()
    if library.is_rtx:
        if level != "NONE" or options.version_compatible:
            raise EngineError(
                "TensorRT for RTX has no hardware_compatibility or version_compatible option. Give "
                "compute_capabilities for the GPUs to support; an RTX engine is rebuilt for each RTX version."
            )
        targets = options.compute_capabilities
        if targets:
            config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            config.set_compute_capability(_capability(library, target), index)
        return
    if options.compute_capabilities:
        raise EngineError(
            f"compute_capabilities={options.compute_capabilities} is an option of TensorRT for RTX; {library.name} "
            "builds for the GPU it runs on. Use hardware_compatibility for an engine that several GPUs share."
        )
    if level != "NONE":
        config.hardware_compatibility_level = library.member("HardwareCompatibilityLevel", level)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)


def _capability(library: Library, target: str) -> Any:
    members = library.trt.ComputeCapability.__members__
    name = "CURRENT" if target.lower() == "current" else f"SM{target.replace('.', '')}"
    if name not in members:
        known = [f"{m[2:-1]}.{m[-1]}" for m in members if m.startswith("SM")]
        raise EngineError(
            f"{library.name} {library.version} cannot target compute capability '{target}'; it knows {known}."
        )
    return members[name]
