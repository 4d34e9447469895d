"""The states of the random generators of python, numpy, torch and CUDA, as values that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

RngState = dict[str, Any]


def seed_all(seed: int) -> None:
    """Seed python, numpy, torch and every CUDA device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng(cuda: bool = True) -> RngState:
    """States of all generators, or those of the CPU: plain values and tensors that `weights_only=True` loads."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: RngState = {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            cached,
        ),
        "torch": torch.get_rng_state(),
    }
    if cuda and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: RngState) -> None:
    """Put all generators back to what `capture_rng` saw; a CUDA state is skipped where there is no GPU."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
