"""Loading an engine file on a GPU.

Deserializing was never run: no GPU that the library supports was at hand. The calls were checked against the
bindings of tensorrt 10.16 and 11.4 and of tensorrt_rtx 1.7. Refusing bad files, and RTX's header check,
run on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.errors import EngineError
from qat.tensorrt.api import Library, load_library
from qat.tensorrt.layers import Layer, layers_from_inspector
from qat.tensorrt.store import manifest_path, read_manifest

# First bytes of an RTX plan. TensorRT's own tag differs between versions and is left for TensorRT to check.
_RTX_MAGIC = b"vtrt"


@dataclass(frozen=True)
class LoadedEngine:
    """A deserialized engine. The runtime must outlive it, so both travel together."""

    library: Library
    engine: Any
    runtime: Any
    path: Path

    def tensor_names(self, mode: str) -> list[str]:
        """Names of the engine's tensors of mode "INPUT" or "OUTPUT", in order."""
        wanted = self.library.member("TensorIOMode", mode)
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        return [name for name in names if self.engine.get_tensor_mode(name) == wanted]

    def layers(self) -> list[Layer]:
        """Layers from the engine inspector.

        Raises:
            EngineError: the engine was not built with detailed profiling verbosity.
        """
        inspector = self.engine.create_engine_inspector()
        layers = self._read(inspector)
        if any(layer.is_weighted and layer.precision == "unknown" for layer in layers):
            # With dynamic shapes some versions know a layer's formats only for given shapes.
            context = self._tuned_context()
            inspector.execution_context = context
            layers = self._read(inspector)
        return layers

    def _read(self, inspector: Any) -> list[Layer]:
        return layers_from_inspector(inspector.get_engine_information(self.library.trt.LayerInformationFormat.JSON))

    def _tuned_context(self) -> Any:
        context = self.engine.create_execution_context()
        for name in self.tensor_names("INPUT"):
            if self.engine.get_tensor_location(name) == self.library.trt.TensorLocation.DEVICE:
                context.set_input_shape(name, tuple(self.engine.get_tensor_profile_shape(name, 0)[1]))
        return context


def check_plan(path: str | Path, library: Library) -> tuple[bytes, dict[str, Any] | None]:
    """Read a plan and refuse what cannot be one, before TensorRT sees it.

    Returns:
        The plan, and its manifest; None for an engine that another tool built.

    Raises:
        EngineError: missing, empty, foreign, damaged (by its manifest), or built by another library or version.
    """
    file = Path(path)
    if not file.is_file():
        raise EngineError(f"There is no engine file '{file}'. Build it with scripts/build_engine.py.")
    plan = file.read_bytes()
    if not plan:
        raise EngineError(f"The engine file '{file}' is empty: its build did not finish. Build it again.")
    if plan.startswith(_RTX_MAGIC) != library.is_rtx:
        found = "it is an engine of TensorRT for RTX" if plan.startswith(_RTX_MAGIC) else f"it begins with {plan[:4]!r}"
        raise EngineError(f"'{file}' is no engine of {library.name}: {found}. Build it with {library.name}.")
    manifest = None
    if manifest_path(file).exists():
        try:
            manifest = read_manifest(file)
        except EngineError as error:
            raise EngineError(f"Engine refused: {error} Build it again.") from error
        if manifest["version"] != library.version and not manifest["options"]["version_compatible"]:
            raise EngineError(
                f"'{file}' was built by {manifest['library']} {manifest['version']}; this is {library.version}. "
                "An engine belongs to one version: build it again, or build it with version_compatible."
            )
    if library.is_rtx:
        _check_rtx_header(library, file, plan)
    return plan, manifest


def _check_rtx_header(library: Library, file: Path, plan: bytes) -> None:
    trt = library.trt
    runtime = library.create_runtime()
    validity, diagnostics = runtime.get_engine_validity(plan[: runtime.engine_header_size])
    if validity == trt.EngineValidity.INVALID and diagnostics:
        members = trt.EngineInvalidityDiagnostics.__members__.items()
        reasons = [name for name, member in members if diagnostics & int(member)] or [str(diagnostics)]
        raise EngineError(
            f"TensorRT for RTX refuses the engine '{file}': {', '.join(reasons)}. Build it for this GPU and version."
        )


def load_engine(path: str | Path, library: Library | None = None) -> LoadedEngine:
    """Deserialize an engine on the current GPU.

    Raises:
        EngineError: no GPU, a file that is no plan or is damaged, or one for another GPU or version.
    """
    import torch

    library = library or load_library()
    plan, manifest = check_plan(path, library)
    if not torch.cuda.is_available():
        raise EngineError(
            f"'{path}' can be run or inspected only on a CUDA GPU, and there is none. On this machine engines can be "
            "built with tensorrt_rtx and inspected from their manifest (scripts/inspect_engine.py)."
        )
    with library.log.record() as recorder:
        runtime = library.create_runtime()
        if manifest is not None and manifest["options"]["version_compatible"]:
            # Such a plan brings a runtime of its own, which TensorRT runs only with leave; ours is trusted, its
            # manifest having its hash.
            runtime.engine_host_code_allowed = True
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        reasons = "; ".join(dict.fromkeys(recorder.errors)) or "no reason was logged"
        raise EngineError(f"{library.name} {library.version} cannot load '{path}': {reasons}. Build it on this GPU.")
    return LoadedEngine(library, engine, runtime, Path(path))
