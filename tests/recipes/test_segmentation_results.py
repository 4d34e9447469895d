"""Rows over seeds, and pictures of masks."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from recipes import segmentation_results as res
from recipes.segmentation_config import SegmentationConfig
from recipes.segmentation_losses import IGNORED
from recipes.segmentation_pictures import BETTER, BOTH, WORSE, colours, difference, overlay, save_comparison, save_masks


def seed(number: int, dice: float, ptq: float, qat: float) -> dict:
    def metrics(value: float) -> dict[str, float]:
        return {"dice": value, "dice_cell": value + 1}

    history = [{"epoch": 0, "loss": 0.1, "metrics": metrics(qat)}]
    return {
        "seed": number,
        "device": "cpu",
        "float": metrics(dice),
        "ptq": [{"method": "max", "metrics": metrics(ptq)}],
        "qat": {"metrics": metrics(qat), "history": history},
    }


def test_the_table_has_mean_and_deviation_and_the_difference_within_a_seed(tmp_path: Path) -> None:
    results = res.start(SegmentationConfig(seeds=(3, 4)))
    results["seeds"] = [seed(3, 80.0, 70.0, 79.5), seed(4, 90.0, 84.0, 90.1)]
    results["deployment"] = {"backend": "ONNX Runtime", "metrics": {"dice": 79.4, "dice_cell": 81.0}}
    columns, lines = res.table_lines(results)
    assert columns == ["model", "dice", "vs float", "dice_cell"]
    assert lines == [
        ["float (2 seeds)", "85.00 +- 5.00", "+0.00", "86.00 +- 5.00"],
        ["PTQ max (2 seeds)", "77.00 +- 7.00", "-8.00", "78.00 +- 7.00"],
        ["QAT (2 seeds)", "84.80 +- 5.30", "-0.20", "85.80 +- 5.30"],
        ["ONNX Runtime (QAT seed 3)", "79.40", "-0.60", "81.00"],
    ]
    assert "unet (resnet34) on masks, cpu" in res.table(results)
    many = {"dice": 80.0, **{f"dice_{n}": 80.0 for n in range(11)}, "miou": 70.0}
    wide = {"seeds": [{**seed(0, 80.0, 70.0, 79.0), "float": many}]}
    assert res.table_lines(wide)[0] == ["model", "dice", "vs float", "miou"], "a column for each of 11 is unreadable"
    assert res.save(results, tmp_path).exists() and (tmp_path / "results.png").stat().st_size > 5000


def test_the_difference_shows_which_model_is_wrong() -> None:
    truth = torch.tensor([[0, 1, 1, 0, IGNORED]])
    first, second = torch.tensor([[0, 1, 0, 1, 0]]), torch.tensor([[0, 0, 1, 1, 1]])
    assert difference(truth, first, second)[0].tolist() == [
        [255] * 3,
        list(BETTER),
        list(WORSE),
        list(BOTH),
        [255] * 3,
    ]


def test_masks_and_overlays_of_many_classes(tmp_path: Path) -> None:
    assert len({tuple(colour) for colour in colours(20)}) == 20
    classes = torch.tensor([[0, 1], [2, 0]])
    save_masks(classes, (0, 7, 255), tmp_path / "m")
    for suffix in ("png", "pgm"):
        assert np.asarray(Image.open(tmp_path / f"m.{suffix}")).tolist() == [[0, 7], [255, 0]]
    assert (tmp_path / "m.pgm").read_bytes().startswith(b"P5")
    grey = torch.full((1, 2, 2), 100, dtype=torch.uint8)
    mixed = overlay(grey, classes, 3, strength=0.5)
    assert mixed.shape == (2, 2, 3)
    assert np.abs(mixed[0, 1] - (50 + colours(3)[1] / 2)).max() <= 1
    models = {"float": classes, "QAT": classes.flip(0)}
    save_comparison(tmp_path / "c.png", grey, torch.tensor([[0, 1], [2, IGNORED]]), models, 3)
    assert (tmp_path / "c.png").stat().st_size > 5000
