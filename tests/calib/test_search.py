"""Each search against the textbook algorithm written as plain loops."""

import numpy as np
import pytest
import torch
from torch import Tensor

import textbook
from qat.calib.search import entropy_bin, mse_bin, percentile_bin

SHAPES = ["normal", "relu", "long tail", "sparse", "uniform", "two humps"]


def histogram(shape: str, bins: int) -> Tensor:
    generator = np.random.default_rng(len(shape))
    x = np.abs(generator.normal(size=20_000))
    if shape == "relu":
        x = np.concatenate([x, np.zeros(30_000)])
    elif shape == "long tail":
        x = np.exp(2 * generator.normal(size=20_000))
    elif shape == "sparse":
        x = generator.choice([0.1, 0.5, 0.9, 3.0], size=500)
    elif shape == "uniform":
        x = generator.uniform(size=20_000)
    elif shape == "two humps":
        x = np.concatenate([x, 20 + generator.normal(size=300)])
    counts, _ = np.histogram(x, bins=bins, range=(0, x.max()))
    return torch.from_numpy(counts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [128, 8])
def test_entropy_is_the_textbook_choice(shape: str, levels: int) -> None:
    counts = histogram(shape, 300)
    assert entropy_bin(counts, levels) == textbook.entropy(counts.numpy(), levels)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_bound", [127, 7])
def test_mse_is_the_textbook_choice(shape: str, max_bound: int) -> None:
    counts = histogram(shape, 500)
    assert mse_bin(counts, max_bound) == textbook.mse(counts.numpy(), max_bound)


def test_percentile_keeps_just_enough() -> None:
    counts = torch.tensor([50, 30, 19, 1])
    assert [percentile_bin(counts, p) for p in (50, 50.1, 99, 99.5, 100)] == [1, 2, 3, 4, 4]


def test_the_arguments_are_not_changed() -> None:
    counts = histogram("normal", 300)
    before = counts.clone()
    entropy_bin(counts, 128)
    mse_bin(counts, 127)
    assert torch.equal(counts, before)


def test_short_histograms() -> None:
    assert entropy_bin(torch.tensor([5, 1]), 128) == 2
    assert mse_bin(torch.tensor([5]), 127) == 1
