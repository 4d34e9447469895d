"""Image files that may be damaged or absent: an error that names the file, or going on without them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from qat.errors import ConfigError
from qat.training.faults import explain_loading

logger = logging.getLogger("qat")
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for files that are absent, cut, no images or far too large."""
_BATCH = 64


def read_image(folder: ImageFolder, index: int) -> Any:
    """An image of the folder, as its loader gives it.

    Raises:
        ConfigError: it cannot be read; the message names the file.
    """
    path, _ = folder.samples[index]
    try:
        return folder.loader(path)
    except UNREADABLE as error:
        raise ConfigError(
            f"image {path} cannot be read: {error}. Repair or remove the file, or leave such files out with "
            "data.corrupt=skip."
        ) from error


class _Readable(Dataset[bool]):
    """Whether each image of a folder can be read."""

    def __init__(self, folder: ImageFolder) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> bool:
        try:
            read_image(self.folder, index)
        except ConfigError:
            return False
        return True


def drop_unreadable(folder: ImageFolder, workers: int) -> list[str]:
    """Read every image once, leave those out of the folder that cannot be read, and return their paths.

    Args:
        folder: changed in place.
        workers: processes that read.

    Raises:
        ConfigError: that leaves a class without images.
        TrainingError: a worker died.
    """
    samples, name = folder.samples, Path(folder.root).name
    loader = DataLoader(_Readable(folder), _BATCH, num_workers=workers, collate_fn=list)
    with explain_loading(lambda: f"checking the images of {name}"):
        readable = [good for batch in tqdm(loader, f"check {name}", leave=False) for good in batch]
    skipped = [path for (path, _), good in zip(samples, readable, strict=True) if not good]
    if not skipped:
        return []
    folder.samples = folder.imgs = [sample for sample, good in zip(samples, readable, strict=True) if good]
    folder.targets = [label for _, label in folder.samples]
    shown = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
    logger.warning("%d of %d images in %s cannot be read and are left out: %s", len(skipped), len(samples), name, shown)
    empty = [folder.classes[label] for label in sorted(set(range(len(folder.classes))) - set(folder.targets))]
    if empty:
        raise ConfigError(f"data.corrupt=skip: {folder.root} has no image that can be read of {', '.join(empty[:5])}.")
    return skipped
