"""Engines on disk: built once, reused only while everything that made them is the same.

Beside `model.engine` lies `model.engine.json`, the manifest: hash of the ONNX file with its external data, options,
TensorRT version, GPU or target, hash of the engine, and the layers that the build log listed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.errors import EngineError
from qat.files import atomic_write, write_json
from qat.locks import file_lock
from qat.onnx.external_data import external_locations
from qat.tensorrt.api import Library, gpu_name, load_library
from qat.tensorrt.build import build_engine
from qat.tensorrt.layers import Layer
from qat.tensorrt.options import BuildOptions
from qat.tensorrt.parse import load_onnx_graph

logger = logging.getLogger("qat.tensorrt")

MANIFEST_FORMAT = 1
_KEY = ("format", "onnx_sha256", "options", "library", "version", "gpu")


@dataclass(frozen=True)
class StoredEngine:
    """An engine file that is whole and fits its manifest. `reused` is False if it was built just now."""

    path: Path
    manifest: dict[str, Any]
    reused: bool
    why_built: str = ""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers from the build log; empty for TensorRT other than RTX, whose engines are inspected on a GPU."""
        return tuple(Layer.from_dict(values) for values in self.manifest["layers"])


def manifest_path(engine: str | Path) -> Path:
    """Where an engine's manifest lies: the same name with `.json` added."""
    return Path(f"{engine}.json")


def hash_onnx(path: str | Path) -> str:
    """SHA-256 of an ONNX file and of the external data that it names.

    Raises:
        EngineError: unreadable, or external data is missing.
    """
    model = load_onnx_graph(path)
    digest = hashlib.sha256(Path(path).read_bytes())
    for location in external_locations(model):
        data = Path(path).parent / location
        if not data.is_file():
            raise EngineError(f"'{path}' keeps weights in '{data}', which is missing. Copy it beside the ONNX file.")
        digest.update(location.encode())
        digest.update(_hash_file(data).encode())
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def engine_key(library: Library, onnx_path: str | Path, options: BuildOptions) -> dict[str, Any]:
    """What must be equal for an engine to be reused."""
    return {
        "format": MANIFEST_FORMAT,
        "onnx_sha256": hash_onnx(onnx_path),
        "options": options.fingerprint(),
        "library": library.name,
        "version": library.version,
        # An RTX engine for explicit targets is the same wherever it is built.
        "gpu": None if options.compute_capabilities else gpu_name(),
    }


def read_manifest(engine: str | Path) -> dict[str, Any]:
    """The manifest of an engine file, after checking that the file is the one it describes.

    Raises:
        EngineError: no engine, no manifest, or either is damaged.
    """
    path, file = Path(engine), manifest_path(engine)
    if not path.is_file():
        raise EngineError(f"there is no engine file '{path}'.")
    try:
        manifest = json.loads(file.read_text())
        missing = [key for key in (*_KEY, "engine_sha256", "layers") if key not in manifest]
    except FileNotFoundError as error:
        raise EngineError(f"'{path}' has no manifest '{file.name}': it was not built by this toolkit.") from error
    except (ValueError, TypeError) as error:
        raise EngineError(f"the manifest '{file}' is damaged: {error}.") from error
    if missing or not isinstance(manifest, dict):
        raise EngineError(f"the manifest '{file}' lacks {missing}.")
    if _hash_file(path) != manifest["engine_sha256"]:
        raise EngineError(f"'{path}' is not the file that its manifest describes: truncated, damaged or replaced.")
    return manifest


def _why_stale(engine: Path, key: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    try:
        manifest = read_manifest(engine)
    except EngineError as error:
        return str(error), {}
    for name in _KEY:
        if manifest[name] != key[name]:
            changed = name
            if name == "options":
                old, new = manifest[name], key[name]
                changed = ", ".join(o for o in new if old.get(o) != new[o]) or name
            return f"{changed} changed since '{engine}' was built.", manifest
    return "", manifest


def build_or_reuse(
    onnx_path: str | Path,
    engine_path: str | Path,
    options: BuildOptions | None = None,
    *,
    library: Library | None = None,
    timing_cache: str | Path | None = None,
    show_progress: bool = False,
    force: bool = False,
) -> StoredEngine:
    """Build `engine_path` from `onnx_path`, or leave it if nothing that matters changed.

    Two processes that ask for the same engine at once build it once: the second waits and reuses. A file at
    `engine_path` that is damaged or foreign is replaced by a new engine, in one step; a failed build leaves the
    old file.

    Raises:
        EngineError: no TensorRT, an unreadable ONNX file, or a failed build.
        KeyboardInterrupt: Ctrl-C; the old engine is untouched.
    """
    library = library or load_library()
    options = options or BuildOptions()
    engine = Path(engine_path)
    if engine.resolve() == Path(onnx_path).resolve():
        raise EngineError(f"The engine would overwrite the ONNX file '{engine}'. Give another --saveEngine.")
    key = engine_key(library, onnx_path, options)
    with file_lock(engine):
        stale, manifest = _why_stale(engine, key)
        if not stale and not force:
            logger.info("Reusing '%s': file, options, library and GPU are unchanged.", engine)
            return StoredEngine(engine, manifest, reused=True)
        stale = stale or "a rebuild was asked for."
        logger.info("Building '%s': %s", engine, stale)
        result = build_engine(
            onnx_path, options, library=library, timing_cache=timing_cache, show_progress=show_progress
        )
        # Whoever reads between the two writes finds a hash that does not fit, and never a wrong match.
        with atomic_write(engine) as temporary:
            temporary.write_bytes(result.engine)
        manifest = {
            **key,
            "engine_sha256": hashlib.sha256(result.engine).hexdigest(),
            "engine_bytes": len(result.engine),
            "onnx": Path(onnx_path).name,
            "build_seconds": round(result.seconds, 3),
            "layers": [layer.to_dict() for layer in result.layers],
        }
        write_json(manifest_path(engine), manifest)
    return StoredEngine(engine, json.loads(json.dumps(manifest)), reused=False, why_built=stale)
