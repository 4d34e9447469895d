"""Dense prediction on images of any size: whole, filled up to a multiple, or in tiles that overlap and are blended."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.errors import ConfigError
from recipes.segmentation_config import STRIDE, InferenceConfig

Predict = Callable[[Tensor], Tensor]
"""A model: images (N, C, H, W), sides multiples of 32, to logits (N, K, H, W)."""


def predict_images(predict: Predict, images: Tensor, how: InferenceConfig) -> Tensor:
    """Logits of images of any size: whole where they are small enough, else in tiles.

    Args:
        predict: the model.
        images: shape (N, C, H, W).
        how: sizes.

    Returns:
        Logits, shape (N, K, H, W), float32.
    """
    if max(images.shape[-2:]) <= how.whole:
        return predict_whole(predict, images)
    return torch.stack([predict_tiled(predict, image, how) for image in images])


def predict_whole(predict: Predict, images: Tensor) -> Tensor:
    """Logits of images filled up by mirroring to multiples of 32, cut back to their size."""
    height, width = images.shape[-2:]
    logits = predict(fill_up(images, padded_size(height), padded_size(width)))
    return logits[..., :height, :width].float()


def padded_size(side: int) -> int:
    """The next multiple of 32."""
    return -(-side // STRIDE) * STRIDE


def fill_up(images: Tensor, height: int, width: int) -> Tensor:
    """Images (N, C, H, W) mirrored at the lower and right border until they have this size at least."""
    while images.shape[-2] < height or images.shape[-1] < width:
        # Mirroring adds at most the size less one at a time; an image of one pixel is repeated.
        down = min(max(height - images.shape[-2], 0), max(images.shape[-2] - 1, 1))
        right = min(max(width - images.shape[-1], 0), max(images.shape[-1] - 1, 1))
        mode = "reflect" if min(images.shape[-2:]) > 1 else "replicate"
        images = F.pad(images, (0, right, 0, down), mode=mode)
    return images


def tile_starts(length: int, tile: int, overlap: float) -> list[int]:
    """First pixels of tiles that cover `length`, evenly spread, each sharing `overlap` of its side at least."""
    if length <= tile:
        return [0]
    step = max(int(tile * (1 - overlap)), 1)
    count = -(-(length - tile) // step) + 1
    return [round(index * (length - tile) / (count - 1)) for index in range(count)]


def blend_window(tile: int, overlap: float, device: torch.device | str = "cpu") -> Tensor:
    """Weights of a tile's pixels, shape (tile, tile): 1 inside, falling to the border along the overlap, never 0."""
    ramp = max(int(tile * overlap), 1)
    distance = torch.arange(tile, device=device) + 1
    line = (torch.minimum(distance, tile + 1 - distance) / (ramp + 1)).clamp(max=1.0)
    return line[:, None] * line[None, :]


def predict_tiled(predict: Predict, image: Tensor, how: InferenceConfig) -> Tensor:
    """Logits of one image from overlapping tiles, weighted by `blend_window`.

    Args:
        predict: the model; it is given `how.batch` tiles at a time, the last batch filled up by repeating the last tile
            so that an engine keeps its shape.
        image: shape (C, H, W); filled up by mirroring where it is smaller than a tile.
        how: sizes.

    Returns:
        Logits, shape (K, H, W), float32, on the image's device.

    Raises:
        ConfigError: the model returns another size than it was given.
    """
    height, width = image.shape[-2:]
    filled = fill_up(image[None], how.tile, how.tile)[0]
    size = filled.shape[-2:]
    places = [
        (y, x) for y in tile_starts(size[0], how.tile, how.overlap) for x in tile_starts(size[1], how.tile, how.overlap)
    ]
    window = blend_window(how.tile, how.overlap, image.device)
    total, weight = torch.zeros((), device=image.device), torch.zeros(size, device=image.device)
    for start in range(0, len(places), how.batch):
        part = places[start : start + how.batch]
        tiles = torch.stack(
            [filled[:, y : y + how.tile, x : x + how.tile] for y, x in _full(part, how.batch, len(places))]
        )
        logits = predict(tiles).float()
        if logits.shape[-2:] != tiles.shape[-2:]:
            raise ConfigError(f"the model made {tuple(logits.shape)} of tiles of {tuple(tiles.shape)}: sizes differ.")
        if start == 0:
            total = torch.zeros((logits.shape[1], *size), device=image.device)
        for (y, x), tile in zip(part, logits, strict=False):
            total[:, y : y + how.tile, x : x + how.tile] += window * tile.to(image.device)
            weight[y : y + how.tile, x : x + how.tile] += window
    return (total / weight)[:, :height, :width]


def _full(part: list[tuple[int, int]], batch: int, total: int) -> list[tuple[int, int]]:
    """The last batch with its last tile repeated; an image of fewer tiles than a batch is left as it is."""
    return part if total <= batch else part + [part[-1]] * (batch - len(part))
