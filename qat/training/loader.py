"""Training data: what the loop asks of a loader, and a loader whose batches depend on seed and epoch alone."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from qat.distributed import rank, world_size
from qat.errors import ConfigError
from qat.training.rng import capture_rng, restore_rng

_WORD = 2**64 - 1


@runtime_checkable
class TrainLoader(Protocol):
    """Batches of one process; under DDP each process has its own share, and all have the same number."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`, counted from 0."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch, the same ones each time for the same epoch; they may lie on the device already."""
        ...


@runtime_checkable
class SkippableLoader(TrainLoader, Protocol):
    """A TrainLoader that can start in mid-epoch; without it a resumed run draws the first batches and drops them."""

    def skip(self, batches: int) -> None:
        """The next iteration starts at batch `batches`, with the batches an unbroken one has from there on."""
        ...


def process_rank() -> tuple[int, int]:
    """Rank and world size: of the process group, else of the torchrun environment, else (0, 1)."""
    if world_size() > 1:
        return rank(), world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _mix(*values: int) -> int:
    """One 63-bit seed from several numbers (the finalizer of SplitMix64, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


class _EpochBatches(Sampler[list[tuple[int, int]]]):
    """Batches of (index, seed) pairs; the pairs carry the epoch into workers that outlive it."""

    def __init__(self, size: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.size, self.batch_size, self.shuffle, self.seed, self.drop_last = (
            size,
            batch_size,
            shuffle,
            seed,
            drop_last,
        )
        self.epoch = 0
        self.start = 0

    def _sampler(self) -> DistributedSampler[int]:
        # Asked for at each use: the loader is often built before the process group is.
        index, world = process_rank()
        return DistributedSampler(
            range(self.size),  # type: ignore[arg-type]
            num_replicas=world,
            rank=index,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
        )

    def __len__(self) -> int:
        count = len(self._sampler())
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        sampler = self._sampler()
        sampler.set_epoch(self.epoch)
        return self._batches(list(sampler), range(self.start, len(self)))

    def _batches(self, indices: list[int], numbers: range) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        for number in numbers:
            chosen = indices[number * self.batch_size : (number + 1) * self.batch_size]
            yield [(index, _mix(self.seed, epoch, index)) for index in chosen]


class _SeededSamples(Dataset[Any]):
    """Reseeds python, numpy and torch before each sample, so that augmentation depends on the pair alone.

    Neither the number of workers, nor the number of processes, nor where an epoch was resumed changes a sample.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, pairs: Sequence[tuple[int, int]]) -> list[Any]:
        # In the main process the same generators feed dropout, which must not see this.
        outside = capture_rng(cuda=False) if get_worker_info() is None else None
        try:
            return [self._sample(index, seed) for index, seed in pairs]
        finally:
            if outside is not None:
                restore_rng(outside)

    def _sample(self, index: int, seed: int) -> Any:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        return self.dataset[index]


class SeededLoader:
    """A torch DataLoader whose batches depend on the seed and the epoch alone; see `make_loader`."""

    def __init__(self, loader: DataLoader[Any], batches: _EpochBatches) -> None:
        self.loader = loader
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the batches; a resumed run must have the same."""
        b = self._batches
        return {"samples": b.size, "batch_size": b.batch_size, "shuffle": b.shuffle, "seed": b.seed}

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`."""
        self._batches.epoch = epoch

    def skip(self, batches: int) -> None:
        """The next iteration starts at batch `batches`; no sample before it is loaded."""
        self._batches.start = batches

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        # Not cleared in the sampler: a new DataLoader iterator with workers iterates that twice.
        self._batches.start = 0
        return batches


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> SeededLoader:
    """A SkippableLoader over a map-style dataset.

    Each sample is loaded with the random generators seeded from (seed, epoch, index), and the order from (seed,
    epoch). Under torchrun or an initialised process group each process gets its share by a DistributedSampler, so
    that N processes together see the batches that one process with N times the batch size does.

    Args:
        dataset: has `__len__` and `__getitem__`; its random augmentation uses python, numpy or torch.
        batch_size: samples per batch and process.
        shuffle: new order each epoch.
        seed: seed of order and augmentation.
        num_workers: worker processes; they live as long as the loader.
        drop_last: leave out the last, smaller batch.
        collate_fn: makes a batch of a list of samples; torch's default if None.

    Raises:
        ConfigError: batch_size below 1, or no batch could be made.
    """
    size = len(dataset)  # type: ignore[arg-type]
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} is below 1. Use 1 or more.")
    batches = _EpochBatches(size, batch_size, shuffle, seed, drop_last)
    if size == 0 or len(batches) == 0:
        raise ConfigError(
            f"a dataset of {size} samples gives no batch of {batch_size} with drop_last={drop_last}. "
            "Use a smaller batch_size or drop_last=False."
        )
    loader: DataLoader[Any] = DataLoader(
        _SeededSamples(dataset),
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=num_workers > 0,
        generator=torch.Generator().manual_seed(seed),
    )
    return SeededLoader(loader, batches)


def to_device(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Batch with every tensor on `device`, copied without waiting; 4-D ones channels-last on request.

    Args:
        batch: a tensor, or tuples, named tuples, lists and mappings of such; anything else is returned as it is.
        device: where to.
        channels_last: convert 4-D floating-point tensors, after the copy, where it is cheap.
    """
    if isinstance(batch, Tensor):
        moved = batch.to(device, non_blocking=True)
        if channels_last and moved.dim() == 4 and moved.is_floating_point():
            moved = moved.contiguous(memory_format=torch.channels_last)
        return moved
    if isinstance(batch, dict):
        return {key: to_device(value, device, channels_last) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, channels_last) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, channels_last) for value in batch)
    return batch
