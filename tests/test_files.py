import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qat.cli import guard
from qat.errors import WriteError
from qat.files import atomic_write, remove_leftovers, write_json
from qat.training.checkpoint import save_checkpoint
from write_faults import largest_file, read_only_folder


def test_a_disk_that_is_full_is_said_and_the_old_file_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, [1])
    with largest_file(1000), pytest.raises(WriteError, match=r"a\.json cannot be written: .*larger than.*run the same"):
        write_json(path, list(range(5000)))
    assert json.loads(path.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_torchs_writer_hides_the_systems_error_and_we_do_not(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"a": torch.ones(3)})
    with largest_file(100_000), pytest.raises(WriteError, match=r"last\.pt cannot be written: the disk is full"):
        save_checkpoint(path, {"a": torch.ones(100_000)})
    assert torch.load(path, weights_only=True)["a"].tolist() == [1, 1, 1]
    assert list(tmp_path.iterdir()) == [path]
    with Path("/dev/full").open("wb") as full, pytest.raises(WriteError, match="Make room"), atomic_write(path):
        full.write(b"1" * 100_000)
        full.flush()


def test_a_read_only_folder_is_said() -> None:
    with read_only_folder() as folder:
        for path in (folder / "old.json", folder / "new" / "deep.json"):
            with pytest.raises(WriteError, match=rf"{path.name} cannot be written: this user may not write there"):
                write_json(path, 2)
        assert (folder / "old.json").read_text() == "1"


def test_a_file_where_a_folder_should_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="a part of the path is a file"):
        write_json(tmp_path / "file" / "a.json", 1)


def test_an_error_that_is_not_about_the_file_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="elsewhere"), atomic_write(tmp_path / "a"):
        Path("/nowhere/elsewhere").read_text()
    with pytest.raises(IsADirectoryError), atomic_write(tmp_path / "a"):
        Path("/").read_text()
    with pytest.raises(RuntimeError, match="mine"), atomic_write(tmp_path / "a"):
        raise RuntimeError("mine")


def test_scripts_say_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"1")

    def broken() -> None:
        raise OSError("a fault of ours")

    assert guard(full) == 2
    assert capsys.readouterr().err.startswith("error: [Errno 28] No space left on device. Make room")
    with pytest.raises(OSError, match="a fault of ours"):
        guard(broken)


def test_leftovers_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f".last.pt.{dead.pid}.tmp", f".last.pt.{os.getpid()}.tmp", "last.pt", f"mine.{dead.pid}.tmp", ".a.tmp"]
    for name in names:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names[1:])
    remove_leftovers(tmp_path / "absent")
