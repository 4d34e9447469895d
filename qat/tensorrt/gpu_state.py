"""State of the GPU that explains a measurement: clocks, power, temperature, driver."""

from __future__ import annotations

import shutil
import subprocess

_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)


def gpu_state() -> dict[str, str] | None:
    """What nvidia-smi reports of torch's current GPU, in its own spelling; None where there is no GPU or no nvidia-smi.

    Clocks fall within seconds after the work stops: ask right after it.
    """
    import torch

    if shutil.which("nvidia-smi") is None or not torch.cuda.is_available():
        return None
    # nvidia-smi counts all GPUs of the machine, CUDA those it was given: the UUID is the same in both.
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (subprocess.SubprocessError, OSError):
        return None
    return parse_state(run.stdout)


def parse_state(line: str) -> dict[str, str] | None:
    """Fields of one line of nvidia-smi's CSV."""
    values = [value.strip() for value in line.strip().split(",")]
    return dict(zip(_FIELDS, values, strict=True)) if len(values) == len(_FIELDS) else None
