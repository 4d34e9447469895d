"""Each search against the textbook algorithm written as plain loops."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

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


def textbook_entropy(counts: np.ndarray, levels: int) -> int:
    counts = counts.astype(np.float64).copy()
    counts[0] = counts[1]
    best, best_divergence = len(counts), math.inf
    for i in range(levels, len(counts) + 1):
        p = counts[:i].copy()
        p[-1] += counts[i:].sum()
        q = np.zeros(i)
        level = np.arange(i) * levels // i
        for j in range(levels):
            members = (level == j) & (counts[:i] > 0)
            if members.any():
                q[members] = counts[:i][members].sum() / members.sum()
        if q.sum() == 0 or (q[p > 0] == 0).any():
            continue
        p, q = p / p.sum(), q / q.sum()
        divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
        if divergence < best_divergence - 1e-12:
            best, best_divergence = i, divergence
    return best


def textbook_mse(counts: np.ndarray, max_bound: int) -> int:
    centres = np.arange(len(counts)) + 0.5
    errors = []
    for i in range(1, len(counts) + 1):
        step = i / max_bound
        rounded = np.clip(np.rint(centres / step), 0, max_bound) * step
        errors.append((counts * (rounded - centres) ** 2).sum())
    return int(np.argmin(errors)) + 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [128, 8])
def test_entropy_is_the_textbook_choice(shape: str, levels: int) -> None:
    counts = histogram(shape, 300)
    assert entropy_bin(counts, levels) == textbook_entropy(counts.numpy(), levels)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_bound", [127, 7])
def test_mse_is_the_textbook_choice(shape: str, max_bound: int) -> None:
    counts = histogram(shape, 500)
    assert mse_bin(counts, max_bound) == textbook_mse(counts.numpy(), max_bound)


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
