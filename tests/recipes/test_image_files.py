"""Images that are missing, cut or no images: an error that names the file, or going on without them."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_recipe_data import make_folder

from qat.errors import ConfigError
from recipes.config import DataConfig
from recipes.data import ImageData, load_data

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """train/cat: one of six is cut, one a dangling link; val/dog: one is text."""
    root = make_folder(tmp_path / "images", sizes=(20,) * 6)
    cut = root / "train" / "cat" / "1.png"
    cut.write_bytes(cut.read_bytes()[:-400])
    (root / "train" / "cat" / "2.png").unlink()
    (root / "train" / "cat" / "2.png").symlink_to("nowhere.png")
    (root / "val" / "dog" / "5.png").write_text("no image")
    return root


def config(root: Path, corrupt: str, in_memory: bool = False, workers: int = 0) -> DataConfig:
    return DataConfig(
        "imagefolder", root, 16, batch_size=2, eval_batch_size=4, workers=workers, corrupt=corrupt, in_memory=in_memory
    )  # type: ignore[arg-type]


def count(data: ImageData) -> tuple[int, int, int]:
    train = data.train(0)
    train.set_epoch(0)
    return tuple(sum(len(y) for _, y in loader) for loader in (train, data.calibration, data.val))  # type: ignore[return-value]


@pytest.mark.parametrize(("in_memory", "workers"), [(False, 0), (False, 1), (True, 0)])
def test_skipped_images_are_listed(
    damaged: Path, caplog: pytest.LogCaptureFixture, in_memory: bool, workers: int
) -> None:
    with caplog.at_level(logging.WARNING, "qat"):
        data = load_data(config(damaged, "skip", in_memory, workers), 0, CPU)
    names = [str(Path(path).relative_to(damaged)) for path in data.skipped]
    assert names == ["train/cat/1.png", "train/cat/2.png", "val/dog/5.png"]
    assert "2 of 12 images in train cannot be read and are left out: " in caplog.text
    assert all(path in caplog.text for path in data.skipped)
    assert count(data) == (10, 10, 11)


@pytest.mark.parametrize(("in_memory", "workers"), [(False, 0), (False, 1), (True, 0)])
def test_by_default_one_is_an_error_of_one_line_that_names_it(damaged: Path, in_memory: bool, workers: int) -> None:
    with pytest.raises(ConfigError, match=r"cat/[12]\.png cannot be read: .*data\.corrupt=skip\.") as caught:
        count(load_data(config(damaged, "error", in_memory, workers), 0, CPU))
    assert "\n" not in str(caught.value) or workers  # a DataLoader of one's own shows the worker's traceback


def test_nothing_is_skipped_where_all_are_whole(tmp_path: Path) -> None:
    data = load_data(config(make_folder(tmp_path), "skip"), 0, CPU)
    assert data.skipped == ()


def test_a_class_without_images_is_an_error(damaged: Path) -> None:
    for path in (damaged / "val" / "cat").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"val has no image that can be read of cat\."):
        load_data(config(damaged, "skip"), 0, CPU)


def test_a_file_that_goes_while_it_trains_is_named(damaged: Path) -> None:
    data = load_data(config(damaged, "skip"), 0, CPU)
    shutil.rmtree(damaged / "val" / "dog")
    with pytest.raises(ConfigError, match=r"val/dog/0\.png cannot be read: .*No such file"):
        count(data)


def test_the_script_lists_them_in_the_results_or_stops(damaged: Path, tmp_path: Path) -> None:
    command = [
        *(
            sys.executable,
            str(ROOT / "scripts" / "qat_finetune.py"),
            "--data.name=imagefolder",
            f"--data-dir={damaged}",
        ),
        *("--model.name=squeezenet1_1", "--data.image_size=32", "--data.batch_size=4", "--data.workers=1"),
        *("--float_train.epochs=1", "--qat.epochs=1", "--quant.batches=1", "--quant.calibrator=max"),
        *("--tensorrt.build=never", "--export.threshold=100", f"--output_dir={tmp_path}/run"),
    ]
    stopped = subprocess.run(command, capture_output=True, text=True, check=False)
    assert stopped.returncode == 2
    last = stopped.stderr.strip().splitlines()[-1]
    assert last.startswith("error: image ") and "data.corrupt=skip" in last
    # The folder of the run that stopped goes on: what is left out is told from what is on the disk.
    went_on = subprocess.run([*command, "--data.corrupt=skip"], capture_output=True, text=True, check=False)
    assert went_on.returncode == 0, went_on.stderr[-2000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [Path(path).name for path in results["skipped_images"]] == ["1.png", "2.png", "5.png"]
