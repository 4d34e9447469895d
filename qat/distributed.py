"""Talking to the other ranks; every function is the identity in a single process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of ranks, 1 where torch.distributed is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank, 0 where torch.distributed is not initialised."""
    return dist.get_rank() if world_size() > 1 else 0


def gather(value: object) -> list[object]:
    """The `value` of every rank, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[object] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def all_reduce_max(*tensors: Tensor | None) -> list[Tensor | None]:
    """Elementwise maximum over ranks of each tensor; a rank that has None takes no part, all None stays None.

    Tensors come back on the device of this rank's own tensor, or on the CPU where it has none. The tensors are
    small and this runs once per calibration, so they travel pickled: every backend and device can do that.
    """
    if world_size() == 1:
        return list(tensors)
    results: list[Tensor | None] = []
    parts = gather([None if t is None else t.cpu() for t in tensors])
    for own, column in zip(tensors, zip(*parts, strict=True), strict=True):
        present = [t for t in column if t is not None]
        merged = torch.stack(present).amax(0) if present else None
        results.append(merged.to(own.device) if merged is not None and own is not None else merged)
    return results
