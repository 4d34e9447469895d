"""What can happen to a run from outside: a data-loading process dies, memory runs out. Said with what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qat.errors import QatError, TrainingError

_DIED = re.compile(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (exited unexpectedly|is killed by signal: [^.]+)")


@contextmanager
def explain_loading(doing: Callable[[], str]) -> Iterator[None]:
    """Say what to do where a worker process of a DataLoader dies; an error of ours raised in one is raised as it was.

    Cleaning up belongs into the block: torch raises at whatever runs when the signal of the death arrives.

    Args:
        doing: gives what the batches were for at that time, such as "epoch 3 of training".

    Raises:
        TrainingError: a worker died.
    """
    try:
        yield
    except QatError as error:
        # torch puts the worker's whole traceback into the message of the error it raises here.
        inner = re.match(r"Caught (\w+) in DataLoader worker process", str(error))
        if inner is None:
            raise
        last = str(error).strip().rpartition(f"{inner[1]}: ")[2]
        raise type(error)(last) from error
    except (RuntimeError, OSError, EOFError) as error:
        how = _how_it_died(error)
        if how is None:
            raise
        raise TrainingError(
            f"a process that loads data {how} ({doing()}). Mostly the machine had no memory left, or no shared memory "
            "(in a container: --shm-size). Use fewer workers (data.workers, num_workers) or a smaller batch; with 0 "
            "workers the main process loads, and shows an error of the data itself. Run again to resume."
        ) from error


def _how_it_died(error: BaseException) -> str | None:
    """What torch says of a worker that died; None where the error is of something else."""
    said = _DIED.search(str(error))
    if said is not None:
        return said[1].replace("is ", "was ", 1)
    # A batch that it had sent can no longer be fetched from it.
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return "died" if any(file.endswith("resource_sharer.py") for file in files) else None


def _batch_size(batch: Any) -> int | None:
    """First dimension of the first tensor in a batch, None where there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((size for part in parts if (size := _batch_size(part)) is not None), None)


@contextmanager
def explain_memory(where: str, advice: Callable[[], str]) -> Iterator[None]:
    """Say what to try where a device, or the CPU, has no memory left.

    Args:
        where: what was being done.
        advice: gives a sentence.

    Raises:
        TrainingError: there was none.
    """
    try:
        yield
    except QatError:
        raise  # it may be this one, from a block inside
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator: can't allocate" not in str(error):
            raise
        detail = ". ".join(str(error).strip().split(". ")[:2]).removesuffix(".")
        raise TrainingError(
            f"memory ran out in {where}: {detail}. {advice()} If another program was using the device, stop it and run "
            "the same command again: it resumes."
        ) from error


def smaller_batch(batch: Any, accumulate: int, precision: str) -> str:
    """The sentence that says which batch size and accumulation to try.

    Args:
        batch: the one that was too large.
        accumulate: batches of one optimizer step.
        precision: mixed precision in use; "no" for none.
    """
    size = _batch_size(batch)
    half = "" if precision != "no" else " mixed_precision=bf16 halves the activations too."
    if size == 1:
        return f"It was a batch of one: use smaller inputs or a smaller network.{half}"
    if size is None:
        return f"Use a smaller batch, and accumulate more of them.{half}"
    smaller = 2 ** ((size - 1).bit_length() - 1)
    more = accumulate * -(-size // smaller)
    return (
        f"Try batch_size={smaller} with accumulate={more} instead of {size} with {accumulate}, in a new output folder: "
        f"a step then averages about as many samples.{half}"
    )
