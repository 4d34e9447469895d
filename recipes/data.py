"""Image data as loaders: handwritten digits, or a folder in torchvision's ImageFolder layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from qat.distributed import rank, world_size
from qat.errors import ConfigError
from qat.training import TrainLoader, make_loader
from recipes.config import DataConfig
from recipes.image_files import drop_unreadable, read_image
from recipes.memory import Augment, MemoryLoader


def image_shape(config: DataConfig) -> tuple[int, int, int]:
    """Channels, height and width of a network input."""
    return (3, config.image_size, config.image_size)


class Loader(Protocol):
    """Batches of (images, labels)."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class ImageData:
    """Loaders of one data set.

    Attributes:
        train: `train(seed)` gives shuffled and augmented batches, in an order of their own for each seed.
        calibration: training images without augmentation, in a fixed random order.
        val: validation images; under torch.distributed each rank has its share.
        classes: class names, in label order.
        skipped: files that could not be read and were left out.
    """

    train: Callable[[int], TrainLoader]
    calibration: Loader
    val: Loader
    classes: tuple[str, ...]
    skipped: tuple[str, ...] = field(default=(), kw_only=True)


def load_data(config: DataConfig, seed: int, device: torch.device) -> ImageData:
    """Build the loaders.

    Raises:
        ConfigError: the folder, or train/ or val/ in it, is missing, empty, or their classes differ; an image cannot
            be read, or with data.corrupt=skip no image of a class can.
    """
    if config.name == "digits":
        return _in_memory(config, seed, *_digits(), device)
    assert config.dir is not None
    train, val = (_folder(config.dir / split) for split in ("train", "val"))
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise ConfigError(f"data.dir={config.dir}: train/ and val/ have different classes: {odd[:5]}. Make them equal.")
    skipped: tuple[str, ...] = ()
    if config.corrupt == "skip":
        skipped = (*drop_unreadable(train, config.workers), *drop_unreadable(val, config.workers))
    if config.in_memory:
        data = _in_memory(config, seed, _decode(train), _decode(val), tuple(train.classes), device)
    else:
        data = _streamed(config, seed, train, val)
    return replace(data, skipped=skipped)


Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def _digits() -> tuple[Arrays, Arrays, tuple[str, ...]]:
    """1,797 real handwritten digits of 8x8 pixels, 80 % for training, classes in equal shares, fixed split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[:, None], 3, axis=1)
    x, x_val, y, y_val = train_test_split(images, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    return (x, y), (x_val, y_val), tuple(str(name) for name in digits.target_names)


def _folder(path: Path) -> ImageFolder:
    if not path.is_dir():
        raise ConfigError(f"data.dir: the folder {path} does not exist. It must hold one folder of images per class.")
    try:
        return ImageFolder(str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"data.dir: {path} holds no usable images: {error}") from error


def _decode(folder: ImageFolder) -> Arrays:
    indices = tqdm(range(len(folder)), f"decode {Path(folder.root).name}", leave=False)
    images = [np.asarray(read_image(folder, index)).transpose(2, 0, 1) for index in indices]
    sizes = {image.shape for image in images}
    if len(sizes) != 1:
        raise ConfigError(
            f"data.in_memory=true needs images of one size, {folder.root} has {len(sizes)}. Use data.in_memory=false."
        )
    return np.stack(images), np.asarray(folder.targets)


def _in_memory(
    config: DataConfig, seed: int, train: Arrays, val: Arrays, classes: tuple[str, ...], device: torch.device
) -> ImageData:
    mean, std = torch.tensor(config.mean), torch.tensor(config.std)
    x, y, x_val, y_val = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (*train, *val))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(device)
    augment = Augment(config.crop_padding, config.flip, config.erase, config.cutmix)
    size = config.image_size
    return ImageData(
        train=lambda run_seed: MemoryLoader(x, y.long(), config.batch_size, size, mean, std, augment, run_seed),
        calibration=MemoryLoader(x[order], y[order].long(), config.eval_batch_size, size, mean, std),
        val=MemoryLoader(x_val, y_val.long(), config.eval_batch_size, size, mean, std),
        classes=classes,
    )


class _Labelled(Dataset[tuple[Tensor, int]]):
    """An ImageFolder with a transform of its own, so that one scan of the disk serves training and calibration."""

    def __init__(self, folder: ImageFolder, transform: v2.Transform) -> None:
        self.folder, self.transform = folder, transform

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(read_image(self.folder, index)), self.folder.samples[index][1]


def _streamed(config: DataConfig, seed: int, train: ImageFolder, val: ImageFolder) -> ImageData:
    normalize = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(config.mean, config.std)]
    flip = [v2.RandomHorizontalFlip()] if config.flip else []
    size = config.image_size
    augment = v2.Compose([v2.RandomResizedCrop(size, antialias=True), *flip, *normalize])
    resize = config.resize_size or round(size / 0.875)
    plain = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size), *normalize])
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    share = range(rank(), len(val), world_size())
    return ImageData(
        train=lambda run_seed: make_loader(
            _Labelled(train, augment),
            config.batch_size,
            shuffle=True,
            seed=run_seed,
            num_workers=config.workers,
            drop_last=True,
        ),
        calibration=_plain_loader(Subset(_Labelled(train, plain), order), config),
        val=_plain_loader(Subset(_Labelled(val, plain), list(share)), config),
        classes=tuple(train.classes),
    )


def _plain_loader(dataset: Dataset[Any], config: DataConfig) -> DataLoader[Any]:
    return DataLoader(dataset, config.eval_batch_size, num_workers=config.workers, pin_memory=torch.cuda.is_available())
