"""The TensorRT stage of a run: build the engine of an ONNX file, and say what runs in INT8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.errors import EngineError
from qat.onnx import to_fp16
from qat.tensorrt import (
    BuildOptions,
    Inspection,
    Library,
    OnnxGraph,
    Profile,
    ShapeRange,
    StoredEngine,
    build_or_reuse,
    inspect_layers,
    load_engine,
    load_library,
)
from qat.tensorrt.target import build_targets, why_not_executable
from recipes.config import RunConfig
from recipes.data import image_shape


@dataclass(frozen=True)
class BuiltEngine:
    """An engine with its layers; `why_not_run` is empty where this machine is expected to execute it."""

    stored: StoredEngine
    library: Library
    inspection: Inspection
    target: str
    why_not_run: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values for results.json."""
        summary = self.inspection.summary()
        return {
            "library": self.library.name,
            "version": self.library.version,
            "target": self.target,
            "engine": self.stored.path.name,
            "engine_bytes": self.stored.manifest["engine_bytes"],
            "build_seconds": self.stored.manifest["build_seconds"],
            "int8_layers": summary["int8_operations"],
            "weighted_layers": summary["weighted_operations"],
            "int8_coverage_percent": summary["int8_coverage_percent"],
            "not_int8": summary["not_int8"],
            "reformats": len(summary["reformats"]),
            "standalone_qdq": len(summary["standalone_qdq"]),
            "not_executed": self.why_not_run,
        }


def find_library(config: RunConfig) -> Library | str:
    """TensorRT as the configuration wants it, or the sentence why there is none.

    Raises:
        EngineError: tensorrt.build is "always" and there is none.
    """
    if config.tensorrt.build == "never":
        return "tensorrt.build is 'never'"
    try:
        return load_library(config.tensorrt.library)
    except EngineError as error:
        if config.tensorrt.build == "always":
            raise
        return str(error)


def make_profiles(config: RunConfig, input_name: str) -> tuple[Profile, ...]:
    """Two profiles: a single image, and every batch up to that of the evaluation, tuned for the largest."""
    shape, most = image_shape(config.data), config.data.eval_batch_size

    def shapes(low: int, high: int) -> Profile:
        return {input_name: ShapeRange((low, *shape), (high, *shape), (high, *shape))}

    return (shapes(1, 1), shapes(1, most)) if config.export.dynamic_batch and most > 1 else (shapes(1, 1),)


def half_file(path: Path) -> Path:
    """Write the half-precision twin of an ONNX file beside it: `x.onnx` -> `x.fp16.onnx`; INT8 stays INT8."""
    half = path.with_suffix(".fp16.onnx")
    to_fp16(path, half)
    return half


def build_for(
    config: RunConfig,
    library: Library,
    path: Path,
    show_progress: bool = False,
    profiles: tuple[Profile, ...] | None = None,
) -> BuiltEngine:
    """Build or reuse `<path>.engine` for a file with one image input, for the profiles given or those of the batches.

    Raises:
        EngineError: the build fails, or fewer layers than tensorrt.min_int8 run in INT8.
    """
    graph = OnnxGraph.load(path)
    targets = build_targets(library, config.tensorrt.compute_capability)
    if profiles is None:
        profiles = make_profiles(config, graph.inputs[0]) if config.export.dynamic_batch else ()
    options = BuildOptions(profiles, compute_capabilities=targets)
    stored = build_or_reuse(path, path.with_suffix(".engine"), options, library=library, show_progress=show_progress)
    layers = stored.layers or tuple(load_engine(stored.path, library).layers())
    target = f"compute capability {targets[0]}" if targets else str(stored.manifest["gpu"])
    return BuiltEngine(stored, library, inspect_layers(layers, graph), target, why_not_executable(library))


def build_for_run(
    config: RunConfig, path: Path, profiles: tuple[Profile, ...] | None = None
) -> tuple[BuiltEngine, Path] | str:
    """Build the engine of a run's Q/DQ file as the configuration wants it: with the file it is built from, or why not.

    Raises:
        EngineError: as for `find_library` and `build_for`.
    """
    library = find_library(config)
    if isinstance(library, str):
        return library
    file = half_file(path) if config.tensorrt.remainder == "fp16" else path
    built = build_for(config, library, file, profiles=profiles)
    if config.tensorrt.min_int8 is not None:
        built.inspection.require_int8(config.tensorrt.min_int8)
    return built, file


def tensorrt_entry(config: RunConfig, path: Path) -> dict[str, Any]:
    """Build the engine of a run's Q/DQ file: the results' "tensorrt" entry, or {"skipped": why}.

    Raises:
        EngineError: as for `find_library` and `build_for`.
    """
    built = build_for_run(config, path)
    if isinstance(built, str):
        return {"skipped": built}
    return built_entry(config, *built)


def built_entry(config: RunConfig, built: BuiltEngine, file: Path) -> dict[str, Any]:
    """The results' "tensorrt" entry of an engine built from `file`."""
    return {"onnx": file.name, "remainder": config.tensorrt.remainder, **built.to_dict()}


def tensorrt_line(entry: dict[str, Any]) -> str:
    """The entry in a sentence or two."""
    if "skipped" in entry:
        return f"TensorRT: no engine was built: {entry['skipped']}"
    run = f" Not executed here: {entry['not_executed']}." if entry["not_executed"] else ""
    return (
        f"TensorRT: {entry['library']} {entry['version']} built {entry['engine']} for {entry['target']}: "
        f"{entry['int8_layers']} of {entry['weighted_layers']} weighted layers in INT8 "
        f"({entry['int8_coverage_percent']:.1f} %), {entry['engine_bytes'] / 2**20:.1f} MiB.{run}"
    )
