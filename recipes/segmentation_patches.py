"""Training patches, cut and augmented on the device: image and mask go through one sampling grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.distributed import rank, world_size
from recipes.segmentation_config import AugmentConfig

ELASTIC_STEP = 32
"""Pixels between the random displacements of the elastic augmentation."""
PIXELS = 65536
"""Pixels of each class remembered as possible centres of patches."""


class Normalize:
    """uint8 images (N, C, H, W) to floats, `(x / 255 - mean) / std`, on the images' device."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device | str) -> None:
        self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self.std = torch.tensor(std, device=device).view(1, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalized images."""
        return (images.float() / 255 - self.mean) / self.std


def class_pixels(masks: Sequence[Tensor], classes: int, seed: int) -> list[Tensor]:
    """For each class that occurs its places (image, row, column), int64, (M, 3); of many, PIXELS drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    for number in range(classes):
        places = []
        for index, mask in enumerate(masks):
            here = (mask.cpu() == number).nonzero()
            places.append(F.pad(here, (1, 0), value=index))
        every = torch.cat(places)
        if len(every) > PIXELS:
            every = every[torch.randint(len(every), (PIXELS,), generator=generator)]
        if len(every):
            found.append(every)
    return found


def sampling_grid(
    centres: Tensor, side: int, size: tuple[int, int], changes: AugmentConfig | None, draws: Tensor
) -> Tensor:
    """Where each pixel of a patch is in its image, for F.grid_sample; shape (N, side, side, 2).

    Args:
        centres: row and column of the patches' centres, in pixels; shape (N, 2).
        side: of the patches.
        size: height and width of the images.
        changes: what is random; None for a plain crop.
        draws: uniform in 0..1, shape (N, 4) at least.
    """
    device, n = centres.device, len(centres)
    line = torch.arange(side, device=device) - (side - 1) / 2
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    rows, columns = rows.expand(n, -1, -1), columns.expand(n, -1, -1)
    if changes is not None:
        if changes.flip:
            rows = torch.where(draws[:, 0, None, None] < 0.5, rows, -rows)
            columns = torch.where(draws[:, 1, None, None] < 0.5, columns, -columns)
        angle = (2 * draws[:, 2] - 1) * math.radians(changes.rotate)
        zoom = 1 + (2 * draws[:, 3] - 1) * changes.scale
        cos, sin = (torch.cos(angle) / zoom)[:, None, None], (torch.sin(angle) / zoom)[:, None, None]
        rows, columns = cos * rows - sin * columns, sin * rows + cos * columns
    rows, columns = rows + centres[:, 0, None, None], columns + centres[:, 1, None, None]
    height, width = size
    return torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], dim=-1)


def elastic_field(n: int, side: int, sigma: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """Smooth random displacements in pixels, shape (N, side, side, 2): (column, row)."""
    points = side // ELASTIC_STEP + 3
    coarse = sigma * torch.randn(n, 2, points, points, generator=generator)
    return F.interpolate(coarse.to(device), (side, side), mode="bicubic", align_corners=True).permute(0, 2, 3, 1)


def cut_patches(
    images: Tensor,
    masks: Tensor,
    centres: Tensor,
    side: int,
    changes: AugmentConfig | None,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Patches of the images, bilinear, and of the masks, nearest; what lies outside is mirrored.

    Args:
        images: uint8, shape (N, C, H, W).
        masks: class numbers, uint8, shape (N, H, W).
        centres: in pixels, shape (N, 2), on the images' device.
        side: of the patches, pixels.
        changes: random augmentation, None for none.
        generator: on the CPU, so that every device draws the same.

    Returns:
        Images in 0..255, float32, shape (N, C, side, side), and class numbers, int64, shape (N, side, side).
    """
    device, n = images.device, len(images)
    height, width = images.shape[-2:]
    draws = torch.rand(n, 6, generator=generator).to(device)
    grid = sampling_grid(centres, side, (height, width), changes, draws)
    if changes is not None and changes.elastic:
        pixel = torch.tensor([2 / width, 2 / height], device=device)
        grid = grid + elastic_field(n, side, changes.elastic, generator, device) * pixel
    how = {"padding_mode": "reflection", "align_corners": False}
    patches = F.grid_sample(images.float(), grid, mode="bilinear", **how)
    classes = F.grid_sample(masks[:, None].float(), grid, mode="nearest", **how)[:, 0].long()
    if changes is not None and (changes.brightness or changes.contrast):
        shift = 255 * changes.brightness * (2 * draws[:, 4] - 1)
        gain = 1 + changes.contrast * (2 * draws[:, 5] - 1)
        middle = patches.mean((1, 2, 3), keepdim=True)
        patches = middle + gain.view(-1, 1, 1, 1) * (patches - middle) + shift.view(-1, 1, 1, 1)
    return patches.clamp(0, 255), classes


class PatchLoader:
    """Batches of (normalized patches, class numbers) from images that lie on the device.

    Order, places and augmentation depend on (seed, epoch, batch number) alone, so a resumed run sees the same batches;
    each rank takes its share of every global batch. Images may differ in size.

    Args:
        images: uint8, shape (C, H, W) each.
        masks: class numbers, uint8, shape (H, W) each.
        pixels: from `class_pixels`, for `balance`.
        side: of the patches.
        count: patches of an epoch, of all ranks together.
        batch_size: patches of one rank's batch.
        balance: share of the patches that are drawn by class.
        normalize: of the images.
        changes: augmentation; None for none.
        seed: of everything random.
    """

    def __init__(
        self,
        images: Sequence[Tensor],
        masks: Sequence[Tensor],
        pixels: Sequence[Tensor],
        side: int,
        count: int,
        batch_size: int,
        balance: float,
        normalize: Normalize,
        changes: AugmentConfig | None,
        seed: int,
    ) -> None:
        self.images, self.masks, self.pixels = images, masks, pixels
        self.side, self.count, self.batch_size, self.balance = side, count, batch_size, balance
        self.normalize, self.changes, self.seed = normalize, changes, seed
        same = len({image.shape for image in images}) == 1
        self._stacked = (torch.stack(list(images)), torch.stack(list(masks))) if same else None
        self._epoch = self._start = 0

    def __len__(self) -> int:
        return max(self.count // (self.batch_size * world_size()), 1)

    def set_epoch(self, epoch: int) -> None:
        """Use the patches of this epoch from the next iteration on."""
        self._epoch = epoch

    def skip(self, batches: int) -> None:
        """Let the next iteration start at this batch."""
        self._start = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start, self._start = self._start, 0
        for number in range(start, len(self)):
            yield self._batch(number * world_size() + rank())

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(hash((self.seed, self._epoch, number)) & 0x7FFFFFFFFFFFFFFF)
        index, centres = self._places(generator)
        if self._stacked is not None:
            images, masks = self._stacked
            chosen = index.to(images.device)
            where = centres.to(images.device)
            patches, classes = cut_patches(images[chosen], masks[chosen], where, self.side, self.changes, generator)
        else:
            pairs = [self._one(i, centre, generator) for i, centre in zip(index.tolist(), centres, strict=True)]
            patches, classes = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return self.normalize(patches), classes

    def _one(self, index: int, centre: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        image, mask = self.images[index][None], self.masks[index][None]
        return cut_patches(image, mask, centre[None].to(image.device), self.side, self.changes, generator)

    def _places(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Image numbers (N) and centres in pixels (N, 2), kept so far inside that a plain crop stays in the image."""
        n = self.batch_size
        index = torch.randint(len(self.images), (n,), generator=generator)
        uniform = torch.rand(n, 2, generator=generator)
        sizes = torch.tensor([image.shape[-2:] for image in self.images])
        kind = torch.randint(len(self.pixels), (n,), generator=generator)
        which = torch.rand(n, generator=generator)
        by_class = torch.rand(n, generator=generator) < self.balance
        drawn = torch.stack(
            [self.pixels[k][int(w * len(self.pixels[k]))] for k, w in zip(kind.tolist(), which, strict=True)]
        )
        index = torch.where(by_class, drawn[:, 0], index)
        size = sizes[index]
        # The half keeps a plain crop on whole pixels, so that it takes them as they are.
        low = (torch.minimum(size, torch.tensor(self.side)) - 1) / 2
        high = size - 1 - low
        free = low + (uniform * (high - low + 1)).floor()
        around = (drawn[:, 1:] + (self.side % 2 - 1) / 2).clamp(low, high)
        return index, torch.where(by_class[:, None], around, torch.minimum(free, high)).float()
