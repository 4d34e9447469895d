"""Finding TensorRT: one code path over `tensorrt` 10.16 and later and `tensorrt_rtx`.

Every member is reached by name: the numbers of NetworkDefinitionCreationFlag and BuilderFlag differ between
TensorRT 10 and 11.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from qat.errors import EngineError
from qat.tensorrt.log import LogHub, make_log_hub

MINIMUM_VERSION = {"tensorrt": (10, 16), "tensorrt_rtx": (1, 7)}
LIBRARY_VARIABLE = "QAT_TENSORRT"
INSTALL = (
    "Install one of them: `pip install 'qat[tensorrt]'` (TensorRT, data-centre and desktop GPUs) or "
    "`pip install 'qat[tensorrt-rtx]'` (TensorRT for RTX; it builds without a GPU)."
)


@dataclass(frozen=True)
class Library:
    """An imported TensorRT: its module, its package name and version, and its one logger."""

    name: str
    version: str
    trt: Any
    log: LogHub

    @property
    def is_rtx(self) -> bool:
        """True for TensorRT for RTX."""
        return self.name == "tensorrt_rtx"

    def member(self, enum_name: str, member: str) -> Any:
        """A member of one of TensorRT's enums, by name.

        Raises:
            EngineError: this version has no such member; the message lists those it has.
        """
        enum = getattr(self.trt, enum_name, None)
        members = getattr(enum, "__members__", {})
        if member not in members:
            raise EngineError(
                f"{self.name} {self.version} has no {enum_name}.{member}; it has {', '.join(members) or 'none'}."
            )
        return members[member]

    def create_builder(self) -> Any:
        """A builder.

        Raises:
            EngineError: TensorRT finds no GPU or driver; TensorRT for RTX needs neither to build.
        """
        return self._create(self.trt.Builder, "builder")

    def create_runtime(self) -> Any:
        """A runtime, to load engines.

        Raises:
            EngineError: TensorRT finds no GPU or driver.
        """
        return self._create(self.trt.Runtime, "runtime")

    def _create(self, make: Any, what: str) -> Any:
        try:
            made = make(self.log.trt_logger)
        # pybind11 reports a factory that returned nothing as a TypeError.
        except (TypeError, RuntimeError) as error:
            made, reason = None, f": {error}"
        else:
            reason = ""
        if made is None:
            raise EngineError(
                f"{self.name} {self.version} cannot start its {what}{reason}. It needs a CUDA GPU and a driver; "
                "where there is none, tensorrt_rtx can build engines (but not run them)."
            )
        return made

    def create_network(self, builder: Any) -> Any:
        """An empty strongly typed network: TensorRT 10 needs the flag, 11 and RTX accept it."""
        flag = self.member("NetworkDefinitionCreationFlag", "STRONGLY_TYPED")
        return builder.create_network(1 << int(flag))


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _import(name: str) -> ModuleType | None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise EngineError(f"Python package '{name}' is installed but broken: {error}. {INSTALL}") from error
    except (ImportError, OSError) as error:
        raise EngineError(
            f"Python package '{name}' is installed but its libraries do not load: {error}. Reinstall it, or set "
            f"{LIBRARY_VARIABLE} to the other library."
        ) from error
    # A plain folder called tensorrt on the path imports as an empty namespace package.
    return module if getattr(module, "__file__", None) else None


@functools.cache
def _load(name: str) -> Library | None:
    module = _import(name)
    if module is None:
        return None
    version = str(getattr(module, "__version__", "unknown"))
    minimum = MINIMUM_VERSION[name]
    if _version_tuple(version) < minimum:
        raise EngineError(
            f"{name} {version} is too old: strongly typed INT8 networks are supported from "
            f"{'.'.join(map(str, minimum))} on. {INSTALL}"
        )
    return Library(name, version, module, make_log_hub(module))


def load_library(name: str | None = None) -> Library:
    """Import TensorRT once.

    Args:
        name: "tensorrt", "tensorrt_rtx", or None for the environment variable QAT_TENSORRT, else the first that
            is installed in that order.

    Raises:
        EngineError: none is installed, its libraries do not load, or it is too old.
    """
    name = name or os.environ.get(LIBRARY_VARIABLE) or None
    if name is not None and name not in MINIMUM_VERSION:
        raise EngineError(f"There is no TensorRT library '{name}'; choose one of {', '.join(MINIMUM_VERSION)}.")
    for candidate in [name] if name else list(MINIMUM_VERSION):
        library = _load(candidate)
        if library is not None:
            return library
    wanted = f"package '{name}' is" if name else "packages tensorrt and tensorrt_rtx are"
    raise EngineError(f"The Python {wanted} not installed. {INSTALL}")


def gpu_name() -> str | None:
    """Name and compute capability of the current CUDA GPU, such as "NVIDIA L4 (8.9)"; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} ({major}.{minor})"
