import os
import subprocess
import sys
from pathlib import Path

import pytest

from qat.errors import ConfigError, WriteError
from qat.locks import hold_folder
from write_faults import read_only_folder

HOLD = """
import os, sys, time
from qat.locks import hold_folder
held = hold_folder(sys.argv[1])
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_folder_has_one_process_and_a_kill_frees_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder), "fork"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as other:
        assert other.stdout is not None
        pid = int(other.stdout.readline())
        try:
            with pytest.raises(ConfigError, match=rf"run is in use by process {pid} on .*choose another output folder"):
                hold_folder(folder)
            # What the killed process forked, as a loader forks its workers, lives on and must not hold the folder.
            other.kill()
            other.wait()
            with hold_folder(folder):
                assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        finally:
            os.killpg(pid, 9)


def test_a_process_may_hold_its_folder_twice(tmp_path: Path) -> None:
    with hold_folder(tmp_path), hold_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_cannot_be_held() -> None:
    refused = r"\.lock cannot be written: this user may not write there"
    with read_only_folder() as folder, pytest.raises(WriteError, match=refused):
        hold_folder(folder)
