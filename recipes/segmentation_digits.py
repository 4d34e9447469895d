"""Pages of real handwritten digits with a mask: segmentation data that comes with scikit-learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CLASSES = ("paper", *(str(digit) for digit in range(10)))
CELLS, SCALE, SIDE = 4, 3, 128
"""Digits in a row of a page, pixels of the page for one of the 8x8 images, side of a page."""
INK = 6
"""Grey value, 0..16, from which a pixel of a digit is ink."""
Page = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def digit_pages(train: int = 96, val: int = 24) -> tuple[list[Page], list[Page]]:
    """Pages for training and validation, of different digits: grey pixels (SIDE, SIDE), and class numbers.

    The pixels of a digit have its class, 1 + digit, and the paper, some 90 % of a page, has class 0. Paper and ink vary
    in brightness from page to page. The same pages every time.
    """
    digits = load_digits()
    parts = train_test_split(digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    x, x_val, y, y_val = parts
    rng = np.random.default_rng(0)
    return [_page(x, y, rng) for _ in range(train)], [_page(x_val, y_val, rng) for _ in range(val)]


def _page(images: NDArray[np.float64], labels: NDArray[np.int64], rng: np.random.Generator) -> Page:
    paper, ink = rng.uniform(150, 250), rng.uniform(0, 90)
    slope = rng.uniform(-30, 30, 2)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE] / SIDE - 0.5
    page = paper + slope[0] * rows + slope[1] * columns
    classes = np.zeros((SIDE, SIDE), np.uint8)
    cell, side = SIDE // CELLS, 8 * SCALE
    for place in range(CELLS * CELLS):
        chosen = rng.integers(len(images))
        drawn = np.kron(images[chosen], np.ones((SCALE, SCALE)))
        top, left = (cell * n + rng.integers(cell - side + 1) for n in divmod(place, CELLS))
        window = (slice(top, top + side), slice(left, left + side))
        page[window] += (ink - page[window]) * drawn / 16
        classes[window][drawn >= INK] = 1 + labels[chosen]
    noisy = page + rng.normal(0, 8, page.shape)
    return noisy.clip(0, 255).round().astype(np.uint8), classes
