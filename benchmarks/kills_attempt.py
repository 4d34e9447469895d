"""One process that runs scripts/qat_finetune.py on the digits, and is killed at a given moment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from kills_check import temporaries
from qat.files import write_json

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "qat_finetune.py"
SETTINGS = [
    "--model.name=squeezenet1_1",
    "--data.image_size=32",
    "--float_train.epochs=4",
    "--float_train.checkpoint_every_steps=5",
    "--quant.batches=2",
    "--qat.epochs=2",
    "--qat.train.checkpoint_every_steps=5",
    "--export.threshold=100",
]
# Ends with its parent, and says on SIGUSR1 where it is; the rest is the script as users run it.
START = """
import ctypes, faulthandler, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
faulthandler.register(signal.SIGUSR1, open(sys.argv[1], "w"))
sys.argv = sys.argv[2:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STAGES = {
    "float_model": "float training",
    "evaluate": "float evaluation",
    "quantize": "placement",
    "calibrate": "calibration",
    "fine_tune": "fine-tuning",
    "export": "export",
    "evaluate_onnx": "ONNX evaluation",
    "tensorrt_entry": "engine build",
    "save": "results",
}
"""What the script's main calls, and what that is."""


WRITES = {
    "float": "float training",
    "ptq": "calibration",
    "qat": "fine-tuning",
    ".qat.onnx": "export",
    ".qat.fp16": "engine build",
}
"""How the path of a file that was being written begins."""


def stage_of_write(path: str) -> str:
    """The stage that writes a file."""
    return next((stage for start, stage in WRITES.items() if path.startswith(start)), "results")


def stage_of(stack: str) -> str:
    """The stage in which a stack of faulthandler (innermost frame first) was taken."""
    frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', stack)
    ours = [i for i, (file, name) in enumerate(frames) if file.endswith(SCRIPT.name) and name != "<module>"]
    if not ours or not ours[0]:
        # Only tracing is deeper than the hundred frames that faulthandler writes.
        return "export" if "/onnx/" in stack else "start or end"
    return STAGES.get(frames[ours[0] - 1][1], "start or end")


def _whole(stack: str) -> bool:
    """Whether the stack of the main thread, the last one of a dump, is written to its end."""
    return re.search(r"Current thread .*(in <module>\n$|\n  \.\.\.\n$)", stack, re.DOTALL) is not None


class Attempt:
    """One process that works in `folder`; in its own group, so that all that it started dies with it."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.stack = folder, log.with_suffix(".stack")
        self.stack.unlink(missing_ok=True)
        command = [sys.executable, "-c", START, str(self.stack), str(SCRIPT), *SETTINGS, f"--output_dir={folder}"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=variables, start_new_session=True
            )

    def cpu_seconds(self) -> float:
        """CPU time used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill_at(self, seconds: float, in_a_write: bool) -> bool:
        """Kill it when it has used so much CPU time, or in the next write after that; False if it ended before."""
        used = 0.0
        while self.process.poll() is None and used < seconds:
            time.sleep(0.003)
            used = self.cpu_seconds()
        while in_a_write and self.process.poll() is None and not temporaries(self.folder):
            time.sleep(0.0005)
        if self.process.poll() is not None:
            return False
        if not in_a_write and self.stack.exists():
            os.kill(self.process.pid, signal.SIGUSR1)
            until = time.monotonic() + 1
            while self.process.poll() is None and time.monotonic() < until and not _whole(self.stack.read_text()):
                time.sleep(0.001)
        return self.kill()

    def kill(self) -> bool:
        """SIGKILL to the group; False if it had ended by itself."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait() < 0

    def wait(self) -> float:
        """Let it end; the CPU seconds that it took."""
        used = 0.0
        while self.process.poll() is None:
            used = self.cpu_seconds()
            time.sleep(0.01)
        return used


def unbroken(work: Path) -> tuple[Path, float]:
    """The folder of a run that was never killed, and its CPU seconds; kept for the next time."""
    folder, record = work / "unbroken", work / "unbroken.json"
    if not record.exists():
        shutil.rmtree(folder, ignore_errors=True)
        attempt = Attempt(folder, work / "unbroken.log")
        seconds = attempt.wait()
        if attempt.process.returncode:
            raise RuntimeError(f"the unbroken run failed:\n{(work / 'unbroken.log').read_text()[-3000:]}")
        write_json(record, {"cpu_seconds": seconds})
    return folder, json.loads(record.read_text())["cpu_seconds"]
