"""Images with masks in folders."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qat.errors import ConfigError
from recipes.segmentation_config import MaskDataConfig
from recipes.segmentation_data import load_masks
from recipes.segmentation_digits import CLASSES, digit_pages
from recipes.segmentation_formats import read_images
from recipes.segmentation_losses import IGNORED

CPU = torch.device("cpu")


def write_pairs(folder: Path, count: int = 10, size: tuple[int, int] = (40, 48), start: int = 0) -> MaskDataConfig:
    """Grey images, and masks of the values 0 and 255 that are 255 where the image is bright."""
    generator = np.random.default_rng(start)
    for number in range(start, start + count):
        pixels = generator.integers(0, 256, size, dtype=np.uint8)
        for name, values in (("images", pixels), ("masks", np.where(pixels > 127, 255, 0).astype(np.uint8))):
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(folder / name / f"{number}.png")
    return MaskDataConfig(dir=folder, patch=32, patches=8, batch_size=4, eval_batch_size=2, mean=(0.0,), std=(1.0,))


def test_the_split_is_by_image_and_always_the_same(tmp_path: Path) -> None:
    config = write_pairs(tmp_path)
    data, again = load_masks(config, CPU), load_masks(config, CPU)
    train, val = ({pair.name for pair in pairs} for pairs in (data.train_pairs, data.val_pairs))
    assert (len(train), len(val)) == (8, 2) and not train & val
    assert val == {pair.name for pair in again.val_pairs}
    other = load_masks(replace(config, split_seed=1), CPU)
    assert {pair.name for pair in other.val_pairs} != val


def test_images_and_masks_belong_together(tmp_path: Path) -> None:
    data = load_masks(write_pairs(tmp_path), CPU)
    for images, masks in data.val:
        assert images.shape == (2, 3, 40, 48) and masks.shape == (2, 40, 48)
        assert torch.equal((images[:, 0] * 255).round() > 127, masks == 1)
    patches, classes = next(iter(data.train(0)))
    assert patches.shape == (4, 3, 32, 32) and classes.shape == (4, 32, 32)
    assert data.classes == ("background", "object")


def test_train_and_val_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    config = write_pairs(tmp_path / "train", 4)
    write_pairs(tmp_path / "val", 2, start=7)
    write_pairs(tmp_path / "val", 1, (50, 64), start=9)
    data = load_masks(replace(config, dir=tmp_path), CPU)
    assert [pair.name for pair in data.train_pairs] == ["0", "1", "2", "3"]
    assert [tuple(images.shape) for images, _ in data.val] == [(2, 3, 40, 48), (1, 3, 50, 64)]


def test_values_of_masks_become_class_numbers(tmp_path: Path) -> None:
    config = write_pairs(tmp_path)
    Image.fromarray(np.full((40, 48), 7, np.uint8)).save(tmp_path / "masks" / "3.png")
    with pytest.raises(ConfigError, match=r"3\.png holds the values \[7\], and data.mask_values is \(0, 255\)"):
        load_masks(config, CPU)
    data = load_masks(replace(config, ignore_value=7), CPU)
    pairs = {pair.name: pair.mask for pair in (*data.train_pairs, *data.val_pairs)}
    assert pairs["3"].unique().tolist() == [IGNORED] and pairs["2"].unique().tolist() == [0, 1]


def test_a_palette_mask_holds_its_indices(tmp_path: Path) -> None:
    config = write_pairs(tmp_path)
    mask = Image.fromarray(np.tile(np.array([0, 1], np.uint8), (40, 24)), "P")
    mask.putpalette([10, 20, 30, 200, 100, 50])
    for number in range(10):
        mask.save(tmp_path / "masks" / f"{number}.png")
    data = load_masks(replace(config, mask_values=(0, 1)), CPU)
    assert data.val_pairs[0].mask[0, :4].tolist() == [0, 1, 0, 1]


def test_errors_name_the_file(tmp_path: Path) -> None:
    config = write_pairs(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.dir is not set.*--data-dir"):
        load_masks(replace(config, dir=None), CPU)
    with pytest.raises(ConfigError, match=r"nowhere/images does not exist"):
        load_masks(replace(config, dir=tmp_path / "nowhere"), CPU)
    with pytest.raises(ConfigError, match="leaves none to train on"):
        load_masks(replace(config, val_share=1.0), CPU)
    Image.fromarray(np.zeros((20, 20), np.uint8)).save(tmp_path / "masks" / "4.png")
    with pytest.raises(ConfigError, match=r"4\.png has 1 slices of \(20, 20\) pixels and its image 1 of \(40, 48\)"):
        load_masks(config, CPU)
    Image.fromarray(np.zeros((40, 48, 3), np.uint8)).save(tmp_path / "masks" / "4.png")
    with pytest.raises(ConfigError, match=r"4\.png cannot be read: its mode is RGB"):
        load_masks(config, CPU)
    (tmp_path / "masks" / "4.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"4\.png cannot be read"):
        load_masks(config, CPU)
    (tmp_path / "masks" / "4.png").unlink()
    with pytest.raises(ConfigError, match=r"do not match: 4 is in one only"):
        load_masks(config, CPU)


def test_one_channel_or_three(tmp_path: Path) -> None:
    config = write_pairs(tmp_path)
    assert [image.shape for image in read_images(tmp_path / "images" / "0.png", 1)] == [(1, 40, 48)]
    assert next(iter(load_masks(replace(config, channels=1), CPU).val))[0].shape == (2, 1, 40, 48)
    with pytest.raises(ConfigError, match="give one number, or 1"):
        replace(config, channels=1, mean=(0.1, 0.2, 0.3))


def test_pages_of_digits_are_real_split_by_digit_and_mostly_paper() -> None:
    train, val = digit_pages(8, 4)
    again, _ = digit_pages(8, 4)
    assert all(np.array_equal(a, b) for a, b in zip(train[3], again[3], strict=True))
    classes = np.stack([mask for _, mask in train + val])
    share = np.bincount(classes.ravel(), minlength=len(CLASSES)) / classes.size
    assert share.shape == (11,) and (share > 0).all() and 0.75 < share[0] < 0.95
    page, mask = train[0]
    assert page[mask > 0].mean() < page[mask == 0].mean() - 30, "ink is darker than paper"
    with pytest.raises(ConfigError, match="those of the digits are"):
        load_masks(MaskDataConfig(name="digits"), CPU)
