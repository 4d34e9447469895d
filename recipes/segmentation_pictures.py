"""Masks as pictures: PNG and PGM files, overlays, and one figure that compares the models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from qat.files import atomic_write
from qat.report.figures import new_figure, plain_text, save_png
from recipes.segmentation_losses import IGNORED

Pixels = NDArray[np.uint8]
BETTER, WORSE, BOTH = (94, 129, 172), (191, 97, 106), (200, 200, 200)
"""Colours of pixels that only the first model, only the second, or neither classifies as the truth does."""


def save_image(pixels: Pixels, path: Path, kind: str) -> None:
    """Write an image atomically; `kind` is Pillow's name of the format, PGM being "PPM" of one channel."""
    with atomic_write(path) as temporary:
        Image.fromarray(pixels).save(temporary, format=kind)


def save_masks(classes: Tensor, values: Sequence[int], path: Path) -> None:
    """Write class numbers (H, W) as grey values, as the masks of the data have them: `path`.png and `path`.pgm."""
    grey = np.asarray(values, np.uint8)[classes.numpy()]
    save_image(grey, path.with_suffix(".png"), "PNG")
    save_image(grey, path.with_suffix(".pgm"), "PPM")


def colours(count: int) -> Pixels:
    """A colour for each class, shape (count, 3)."""
    import matplotlib as mpl

    table = mpl.colormaps["tab10" if count <= 10 else "tab20"]
    return np.asarray([[round(255 * part) for part in table(i % table.N)[:3]] for i in range(count)], np.uint8)


def to_rgb(image: Tensor) -> Pixels:
    """uint8 pixels (C, H, W), grey or colour, as (H, W, 3)."""
    pixels = image.numpy().transpose(1, 2, 0)
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


def overlay(image: Tensor, classes: Tensor, count: int, strength: float = 0.4) -> Pixels:
    """The image (C, H, W) with the classes (H, W) as transparent colours, shape (H, W, 3)."""
    mixed = (1 - strength) * to_rgb(image) + strength * colours(count)[classes.numpy()]
    return mixed.round().astype(np.uint8)


def difference(truth: Tensor, first: Tensor, second: Tensor) -> Pixels:
    """Where two models part from the truth: BETTER, WORSE and BOTH; white elsewhere. Ignored pixels are white."""
    counted = truth.numpy() != IGNORED
    wrong = [(classes.numpy() != truth.numpy()) & counted for classes in (first, second)]
    picture = np.full((*truth.shape, 3), 255, np.uint8)
    picture[wrong[0] & wrong[1]] = BOTH
    picture[wrong[0] & ~wrong[1]] = WORSE
    picture[~wrong[0] & wrong[1]] = BETTER
    return picture


def save_comparison(path: Path, image: Tensor, truth: Tensor, models: dict[str, Tensor], count: int) -> None:
    """One figure: the image, the truth, what each model makes of it, and where first and last model part.

    Args:
        path: PNG.
        image: uint8, shape (C, H, W).
        truth: class numbers, shape (H, W).
        models: class numbers of each, the float model first and the QAT model last.
        count: classes.
    """
    table = colours(count)

    def painted(classes: Tensor) -> Pixels:
        known = classes.numpy() != IGNORED
        return np.where(known[..., None], table[np.where(known, classes.numpy(), 0)], 255).astype(np.uint8)

    first, *_, last = models
    panels = [("input", to_rgb(image)), ("truth", painted(truth))]
    panels += [(name, painted(classes)) for name, classes in models.items()]
    panels += [(f"wrong: {first} red, {last} blue, both grey", difference(truth, models[first], models[last]))]
    columns = 3
    rows = -(-len(panels) // columns)
    figure = new_figure(3.4 * columns, 3.6 * rows)
    for axes, (title, pixels) in zip(figure.subplots(rows, columns, squeeze=False).ravel(), panels, strict=False):
        axes.imshow(pixels, interpolation="nearest")
        axes.set_title(plain_text(title), fontsize=9)
    for axes in figure.axes:
        axes.axis("off")
    save_png(figure, path)
