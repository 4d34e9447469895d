"""Images with masks, in folders: read once, split by file, kept on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from qat.distributed import rank, world_size
from qat.errors import ConfigError
from recipes.data import ImageData
from recipes.segmentation_config import MaskDataConfig
from recipes.segmentation_digits import CLASSES as DIGIT_CLASSES
from recipes.segmentation_digits import Page, digit_pages
from recipes.segmentation_formats import SUFFIXES, read_images, read_masks, split_suffix
from recipes.segmentation_losses import IGNORED
from recipes.segmentation_patches import Normalize, PatchLoader, class_pixels


@dataclass(frozen=True)
class Pair:
    """An image's name, its pixels (uint8, (C, H, W)) and its class numbers (uint8, (H, W); IGNORED where ignored)."""

    name: str
    image: Tensor
    mask: Tensor


@dataclass(frozen=True)
class MaskData(ImageData):
    """The loaders, and the pairs they come from; `val` gives whole images, several only where they have one size."""

    train_pairs: tuple[Pair, ...]
    val_pairs: tuple[Pair, ...]
    normalize: Normalize


def load_masks(config: MaskDataConfig, device: torch.device) -> MaskData:
    """Read everything and build the loaders.

    Raises:
        ConfigError: a folder or a mask is missing, a file cannot be read, image and mask differ in size, or a mask
            holds a value that no class has.
    """
    if config.name == "digits" and config.dir is None:
        train, val = (_pages(config, part) for part in digit_pages())
    else:
        train, val = (_read_all(config, part) for part in _split(config))
    normalize = Normalize(config.mean, config.std, device)
    images, masks = ([getattr(pair, name).to(device) for pair in train] for name in ("image", "mask"))
    pixels = class_pixels([pair.mask for pair in train], len(config.class_names), config.split_seed)

    def loader(count: int, batch_size: int, balance: float, augmented: bool, seed: int) -> PatchLoader:
        changes = config.augment if augmented else None
        return PatchLoader(images, masks, pixels, config.patch, count, batch_size, balance, normalize, changes, seed)

    return MaskData(
        train=lambda seed: loader(config.patches, config.batch_size, config.balance, True, seed),
        calibration=loader(config.patches, config.eval_batch_size, 1.0, False, config.split_seed),
        val=WholeImages(val[rank() :: world_size()], config.eval_batch_size, normalize, device),
        classes=config.class_names,
        train_pairs=train,
        val_pairs=val,
        normalize=normalize,
    )


class WholeImages:
    """Batches of (normalized images, class numbers), neighbours of one size together."""

    def __init__(self, pairs: Sequence[Pair], batch_size: int, normalize: Normalize, device: torch.device) -> None:
        self.normalize = normalize
        self._batches: list[tuple[Tensor, Tensor]] = []
        for _, group in groupby(pairs, key=lambda pair: pair.image.shape):
            same = list(group)
            for start in range(0, len(same), batch_size):
                part = same[start : start + batch_size]
                images, masks = torch.stack([p.image for p in part]), torch.stack([p.mask for p in part])
                self._batches.append((images.to(device), masks.to(device)))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, masks in self._batches:
            yield self.normalize(images), masks.long()


Files = list[tuple[Path, Path]]


def _split(config: MaskDataConfig) -> tuple[Files, Files]:
    """Files for training and validation: by folder where there are train/ and val/, else by image at random."""
    if config.dir is None:
        raise ConfigError("data.dir is not set. Give the folder that holds images/ and masks/: --data-dir FOLDER.")
    if (config.dir / "train").is_dir() and (config.dir / "val").is_dir():
        return _files(config.dir / "train"), _files(config.dir / "val")
    files = _files(config.dir)
    count = max(round(config.val_share * len(files)), 1)
    if count >= len(files):
        raise ConfigError(
            f"data.dir={config.dir} has {len(files)} images and data.val_share={config.val_share} leaves none to train "
            "on. Add images, or lower data.val_share."
        )
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(config.split_seed)).tolist()
    val = set(order[:count])
    return [f for i, f in enumerate(files) if i not in val], [f for i, f in enumerate(files) if i in val]


def _files(folder: Path) -> Files:
    images, masks = (_by_stem(folder / name) for name in ("images", "masks"))
    missing = sorted(set(images) ^ set(masks))
    if missing:
        raise ConfigError(
            f"data.dir: in {folder} images/ and masks/ do not match: {', '.join(missing[:5])} is in one only. Give "
            "each image a mask of the same name."
        )
    return [(images[stem], masks[stem]) for stem in sorted(images, key=_in_order)]


def _in_order(stem: str) -> tuple[int, str]:
    return (int(stem), stem) if stem.isdecimal() else (-1, stem)


def _by_stem(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ConfigError(f"data.dir: the folder {folder} does not exist. It must hold one file for each image.")
    found = {split_suffix(path)[0]: path for path in sorted(folder.iterdir()) if split_suffix(path)[1]}
    if not found:
        raise ConfigError(f"data.dir: {folder} holds no images ({', '.join(SUFFIXES)}).")
    return found


def _pages(config: MaskDataConfig, pages: Sequence[Page]) -> tuple[Pair, ...]:
    if config.class_names != DIGIT_CLASSES:
        raise ConfigError(f"data.class_names={config.class_names}: those of the digits are {DIGIT_CLASSES}.")
    return tuple(
        Pair(str(number), torch.from_numpy(grey).expand(config.channels, -1, -1), torch.from_numpy(classes))
        for number, (grey, classes) in enumerate(pages)
    )


def _read_all(config: MaskDataConfig, files: Files) -> tuple[Pair, ...]:
    return tuple(pair for both in tqdm(files, "read", leave=False) for pair in _read(config, *both))


def _read(config: MaskDataConfig, image: Path, mask: Path) -> list[Pair]:
    """The pair of two files, or those of the slices of two volumes."""
    images, masks = read_images(image, config.channels), read_masks(mask)
    sizes = [[array.shape[-2:] for array in arrays] for arrays in (images, masks)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"mask {mask} has {len(masks)} slices of {sizes[1][0]} pixels and its image {len(images)} of {sizes[0][0]}."
            " Make them equal."
        )
    stem = split_suffix(image)[0]
    names = [stem] if len(images) == 1 else [f"{stem}_{number:03d}" for number in range(len(images))]
    found = zip(names, images, (_to_classes(config, values, mask) for values in masks), strict=True)
    return [Pair(name, torch.from_numpy(pixels), classes) for name, pixels, classes in found]


def _to_classes(config: MaskDataConfig, values: NDArray[np.uint8], path: Path) -> Tensor:
    known = len(config.mask_values)
    table = np.full(256, known, np.uint8)
    table[list(config.mask_values)] = range(known)
    if config.ignore_value is not None:
        table[config.ignore_value] = IGNORED
    classes = table[values]
    if (classes == known).any():
        unknown = sorted({int(v) for v in np.unique(values)} - {*config.mask_values, config.ignore_value})
        raise ConfigError(
            f"mask {path} holds the values {unknown[:8]}, and data.mask_values is {config.mask_values}. Name every "
            "value, or set data.ignore_value; a JPEG cannot hold masks."
        )
    return torch.from_numpy(classes)
