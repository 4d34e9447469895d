"""Small data sets kept as one uint8 tensor on the device; augmentation runs there in whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.distributed import rank, world_size


@dataclass(frozen=True)
class Augment:
    """Random crop after padding (source pixels), mirror, blanked square (share of the side)."""

    crop_padding: int = 0
    flip: bool = False
    erase: float = 0.0


class MemoryLoader:
    """Batches of (images, labels) from tensors already on the device.

    Order and augmentation depend on (seed, epoch, batch number) alone, so a resumed run sees the same batches; each
    rank takes its share of every global batch.

    Args:
        images: uint8, shape (N, 3, H, W).
        labels: int64, shape (N,).
        batch_size: images of one rank's batch.
        image_size: side of the images returned, pixels.
        mean: shape (3,), of images in [0, 1].
        std: shape (3,).
        augment: None for evaluation: no shuffling, nothing random, the last batch may be short.
        seed: seed of order and augmentation.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        image_size: int,
        mean: Tensor,
        std: Tensor,
        augment: Augment | None = None,
        seed: int = 0,
    ) -> None:
        self.images, self.labels = images, labels
        self.batch_size, self.image_size = batch_size, image_size
        self.mean, self.std = mean.view(1, 3, 1, 1).to(images.device), std.view(1, 3, 1, 1).to(images.device)
        self.augment, self.seed = augment, seed
        self._epoch = self._start = 0

    def __len__(self) -> int:
        if self.augment is None:
            return -(-len(range(rank(), len(self.images), world_size())) // self.batch_size)
        return max(len(self.images) // (self.batch_size * world_size()), 1)

    def set_epoch(self, epoch: int) -> None:
        """Use the order and augmentation of this epoch from the next iteration on."""
        self._epoch = epoch

    def skip(self, batches: int) -> None:
        """Let the next iteration start at this batch."""
        self._start = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self.images))
        if self.augment is not None:
            order = torch.randperm(len(self.images), generator=self._generator(0))
        order = order[rank() :: world_size()].to(self.images.device)
        start, self._start = self._start, 0
        for number in range(start, len(self)):
            index = order[number * self.batch_size : (number + 1) * self.batch_size]
            images = self.images[index]
            if self.augment is not None:
                images = self._augmented(images, self._generator(1 + number * world_size() + rank()))
            yield self._normalized(images), self.labels[index]

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash((self.seed, self._epoch, stream)) & 0x7FFFFFFFFFFFFFFF)

    def _normalized(self, images: Tensor) -> Tensor:
        x = images.float() / 255
        if x.shape[-1] != self.image_size or x.shape[-2] != self.image_size:
            size = (self.image_size, self.image_size)
            x = F.interpolate(x, size, mode="bilinear", align_corners=False, antialias=x.shape[-1] > self.image_size)
        return (x - self.mean) / self.std

    def _augmented(self, images: Tensor, generator: torch.Generator) -> Tensor:
        assert self.augment is not None
        n, _, height, width = images.shape
        device, pad = images.device, self.augment.crop_padding
        draws = torch.rand(5, n, generator=generator).to(device)
        rows = torch.arange(height, device=device).expand(n, -1)
        columns = torch.arange(width, device=device).expand(n, -1)
        if self.augment.flip:
            columns = torch.where(draws[0, :, None] < 0.5, columns.flip(1), columns)
        if pad:
            images = F.pad(images, (pad, pad, pad, pad))
            rows = rows + (draws[1] * (2 * pad + 1)).long()[:, None]
            columns = columns + (draws[2] * (2 * pad + 1)).long()[:, None]
        batch = torch.arange(n, device=device)[:, None, None]
        images = images[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        if self.augment.erase:
            side = self.augment.erase * torch.tensor([height, width], device=device)
            y, x = draws[3] * height, draws[4] * width
            inside_y = (torch.arange(height, device=device) - y[:, None]).abs() * 2 < side[0]
            inside_x = (torch.arange(width, device=device) - x[:, None]).abs() * 2 < side[1]
            hole = inside_y[:, None, :, None] & inside_x[:, None, None, :]
            fill = (self.mean * 255).to(images.dtype)
            images = torch.where(hole, fill, images)
        return images
