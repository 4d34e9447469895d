"""Which GPU an engine is built for, and whether this machine can run it."""

from __future__ import annotations

from qat.tensorrt.api import Library

RTX_CAPABILITIES = "7.5, 8.0, 8.6, 8.9, 12.0+"
"""What engines of TensorRT for RTX run on (its documentation, "CPU-Only AOT and TensorRT-RTX Engines"; its enum
ComputeCapability); it refuses 9.0 (H100, H200) with "The engine cannot run on this GPU"."""
TURING = (7, 5)
"""Oldest GPUs of TensorRT from 10.5 on (its release notes) and of TensorRT for RTX. An RTX engine runs there only if it
was built for 7.5 alone, and its convolutions are not INT8 (seen in the build log of 1.7.1)."""


def rtx_runs_on(capability: tuple[int, int]) -> bool:
    """True where TensorRT for RTX executes engines on GPUs of this compute capability."""
    return capability in (TURING, (8, 0), (8, 6), (8, 9)) or capability >= (12, 0)


def why_not_executable(library: Library) -> str:
    """A sentence where this machine cannot run the library's engines; empty where it is expected to."""
    import torch

    if not torch.cuda.is_available():
        where = f"compute capability {RTX_CAPABILITIES}" if library.is_rtx else "an NVIDIA GPU with a driver"
        name = "TensorRT for RTX" if library.is_rtx else "TensorRT"
        return f"no GPU: {name} executes only on {where}"
    capability = torch.cuda.get_device_capability()
    shown = f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}"
    if library.is_rtx and not rtx_runs_on(capability):
        return f"TensorRT for RTX builds here but executes only on compute capability {RTX_CAPABILITIES}; {shown}"
    if not library.is_rtx and capability < TURING:
        return f"TensorRT executes only on compute capability 7.5 and later; {shown}"
    return ""


def build_targets(library: Library, fallback: str) -> tuple[str, ...]:
    """Values for `BuildOptions.compute_capabilities`.

    Empty, the library's default, where this machine can run what is built so; for RTX `fallback` where it cannot, and
    "7.5" on a Turing GPU, which the default leaves out.
    """
    import torch

    if not library.is_rtx:
        return ()
    if why_not_executable(library):
        return (fallback,)
    return ("7.5",) if torch.cuda.get_device_capability() == TURING else ()
