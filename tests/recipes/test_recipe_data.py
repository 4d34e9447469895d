from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qat.errors import ConfigError
from recipes.config import DataConfig
from recipes.data import load_data
from recipes.memory import Augment, MemoryLoader

CPU = torch.device("cpu")


def make_folder(root: Path, sizes: tuple[int, ...] = (20, 20, 20), classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number, size in enumerate(sizes):
                pixels = generator.integers(0, 255, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def loader(augment: Augment | None, seed: int = 0, count: int = 10) -> MemoryLoader:
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(3)).byte()
    return MemoryLoader(images, torch.arange(count), 4, 8, torch.zeros(3), torch.ones(3), augment, seed)


def test_digits_are_real_and_split_by_class() -> None:
    data = load_data(DataConfig(eval_batch_size=400), 0, CPU)
    images, labels = next(iter(data.val))
    assert images.shape == (360, 3, 32, 32)
    assert labels.bincount().min() >= 34
    assert len(data.classes) == 10
    assert len(data.train(0)) == 1437 // 64


def test_evaluation_gives_every_image_once_in_order() -> None:
    batches = list(loader(None))
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert torch.cat([y for _, y in batches]).tolist() == list(range(10))
    again = torch.cat([x for x, _ in batches])
    assert torch.equal(again, loader(None).images.float() / 255)


def test_epochs_differ_and_repeat_and_can_be_entered_in_the_middle() -> None:
    train = loader(Augment(2, True, 0.3))
    epochs = []
    for epoch in (0, 1, 0):
        train.set_epoch(epoch)
        epochs.append(list(train))
    assert not torch.equal(epochs[0][0][1], epochs[1][0][1])
    for (x, y), (x2, y2) in zip(epochs[0], epochs[2], strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
    train.set_epoch(0)
    train.skip(1)
    rest = list(train)
    assert len(rest) == 1
    assert torch.equal(rest[0][0], epochs[0][1][0])
    assert len(list(train)) == 2


def test_cutmix_pastes_a_box_of_the_neighbour_and_mixes_labels_by_area() -> None:
    flat = torch.arange(8).view(8, 1, 1, 1).expand(8, 3, 8, 8).byte() * 10
    train = MemoryLoader(flat, torch.arange(8), 8, 8, torch.zeros(3), torch.ones(3), Augment(cutmix=1.0))
    for epoch in range(4):
        train.set_epoch(epoch)
        (images, labels), (again, labels_again) = next(iter(train)), next(iter(train))
        assert torch.equal(images, again)
        assert torch.equal(labels, labels_again)
        values = (images[:, 0] * 255 / 10).round().long()
        shares = torch.stack([(values == c).float().mean((1, 2)) for c in range(8)], 1)
        assert torch.allclose(labels, shares, atol=1e-6)
        assert (labels.max(1).values < 1).any()
    whole = MemoryLoader(flat, torch.arange(8), 8, 8, torch.zeros(3), torch.ones(3), Augment(cutmix=1e-9))
    assert torch.equal(next(iter(whole))[1].max(1).values, torch.ones(8))


def test_augmentation_shifts_mirrors_and_erases() -> None:
    images = loader(None).images
    train = loader(Augment(2, False, 0.0))
    for x, y in train:
        for image, label in zip(x, y, strict=True):
            padded = torch.nn.functional.pad(images[label].float() / 255, (2, 2, 2, 2))
            windows = [padded[:, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
            assert any(torch.equal(image, window) for window in windows)
    mirrored = loader(Augment(0, True, 0.0))
    both = [torch.equal(x[0] * 255, images[y[0]].float()) for e in range(6) for x, y in _epoch(mirrored, e)]
    assert 0 < sum(both) < len(both)
    erased = next(iter(loader(Augment(0, False, 0.5))))[0]
    assert 0.02 < (erased == 0).float().mean() < 0.4


def _epoch(train: MemoryLoader, epoch: int) -> MemoryLoader:
    train.set_epoch(epoch)
    return train


@pytest.mark.parametrize("in_memory", [False, True])
def test_image_folder(tmp_path: Path, in_memory: bool) -> None:
    root = make_folder(tmp_path)
    config = DataConfig("imagefolder", root, 16, batch_size=2, eval_batch_size=4, workers=0, in_memory=in_memory)
    data = load_data(config, 0, CPU)
    assert data.classes == ("cat", "dog")
    labels = torch.cat([y for _, y in data.val])
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    train = data.train(0)
    train.set_epoch(0)
    images, _ = next(iter(train))
    assert images.shape == (2, 3, 16, 16)
    calibration = torch.cat([y for _, y in data.calibration])
    assert sorted(calibration.tolist()) == [0, 0, 0, 1, 1, 1]


def test_folder_errors_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/train does not exist"):
        load_data(DataConfig("imagefolder", tmp_path / "nowhere"), 0, CPU)
    root = make_folder(tmp_path)
    with pytest.raises(ConfigError, match="images of one size"):
        Image.new("RGB", (9, 9)).save(root / "train" / "cat" / "odd.png")
        load_data(DataConfig("imagefolder", root, in_memory=True), 0, CPU)
    (root / "val" / "bird").mkdir()
    Image.new("RGB", (9, 9)).save(root / "val" / "bird" / "a.png")
    with pytest.raises(ConfigError, match=r"different classes: \['bird'\]"):
        load_data(DataConfig("imagefolder", root), 0, CPU)


def test_broken_image_is_named(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    (root / "train" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"cat/0.png cannot be read"):
        load_data(DataConfig("imagefolder", root, in_memory=True), 0, CPU)
