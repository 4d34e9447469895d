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
    """Random crop after padding (source pixels), mirror, blanked square (share of the side), share of mixed images."""

    crop_padding: int = 0
    flip: bool = False
    erase: float = 0.0
    cutmix: float = 0.0


class MemoryLoader:
    """Batches of (images, labels) from tensors already on the device; labels are probabilities where images are mixed.

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
        self.classes = int(labels.max()) + 1
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
            images, labels = self.images[index], self.labels[index]
            if self.augment is not None:
                generator = self._generator(1 + number * world_size() + rank())
                images = self._augmented(images, generator)
                if self.augment.cutmix:
                    images, labels = self._mixed(images, labels, generator)
            yield self._normalized(images), labels

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
            share = torch.full((n,), self.augment.erase, device=device)
            images = torch.where(_boxes(images, draws[3:], share), (self.mean * 255).to(images.dtype), images)
        return images

    def _mixed(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """CutMix (Yun et al. 2019) with its alpha of 1: a box from the neighbour in the batch, labels by area."""
        assert self.augment is not None
        draws = torch.rand(4, len(images), generator=generator).to(images.device)
        share = torch.where(draws[2] < self.augment.cutmix, draws[3].sqrt(), 0)
        box = _boxes(images, draws[:2], share)
        area = box.float().mean((1, 2, 3))[:, None]
        targets = F.one_hot(labels, self.classes).float()
        mixed = torch.where(box, images.roll(1, 0), images)
        return mixed, torch.lerp(targets, targets.roll(1, 0), area)


def _boxes(images: Tensor, centres: Tensor, share: Tensor) -> Tensor:
    """Pixels in a box of `share` (N) of each side around `centres` (2, N) in 0..1; bool, shape (N, 1, H, W)."""
    inside = []
    for size, centre in zip(images.shape[2:], centres, strict=True):
        distance = (torch.arange(size, device=images.device) - centre[:, None] * size).abs()
        inside.append(distance * 2 < share[:, None] * size)
    rows, columns = inside
    boxes: Tensor = rows[:, None, :, None] & columns[:, None, None, :]
    return boxes
