"""The searches for where to clip as plain loops: what `qat.calib.search` has to choose, in tests and before timing."""

from __future__ import annotations

import math

import numpy as np


def entropy(counts: np.ndarray, levels: int) -> int:
    """Bins to keep by Migacz's search, candidate by candidate and level by level."""
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


def mse(counts: np.ndarray, max_bound: int) -> int:
    """Bins to keep for the least mean squared error, every value at its bin's centre."""
    centres = np.arange(len(counts)) + 0.5
    errors = []
    for i in range(1, len(counts) + 1):
        step = i / max_bound
        rounded = np.clip(np.rint(centres / step), 0, max_bound) * step
        errors.append((counts * (rounded - centres) ** 2).sum())
    return int(np.argmin(errors)) + 1
