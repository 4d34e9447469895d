"""The Runner interface: named NumPy arrays in, named NumPy arrays out, whatever executes the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qat.errors import RunnerError

Array = NDArray[np.generic]
Arrays = dict[str, Array]
"""NumPy arrays by the name of the input or output."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, NumPy type name and shape of one input or output; None marks a dynamic dimension."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class Runner(Protocol):
    """Anything that executes a model on named arrays."""

    @property
    def input_names(self) -> list[str]:
        """Names that `run` expects, in the model's order."""
        ...

    @property
    def output_names(self) -> list[str]:
        """Names that `run` returns, in the model's order."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Execute once. Every input must be given; every output is returned."""
        ...


def check_inputs(inputs: Mapping[str, Array], specs: Sequence[TensorSpec]) -> None:
    """Compare names, types and fixed dimensions of `inputs` with what the model declares.

    Raises:
        RunnerError: a missing or unknown name, a wrong type, or a shape that does not fit.
    """
    wanted = [spec.name for spec in specs]
    unknown = [name for name in inputs if name not in wanted]
    missing = [name for name in wanted if name not in inputs]
    if unknown or missing:
        raise RunnerError(f"The model takes the inputs {wanted}: missing {missing}, unknown {unknown}.")
    for spec in specs:
        array = inputs[spec.name]
        if str(array.dtype) != spec.dtype:
            raise RunnerError(f"Input '{spec.name}' has type {array.dtype}; the model takes {spec.dtype}. Use astype.")
        fits = len(array.shape) == len(spec.shape) and all(
            want is None or want == got for want, got in zip(spec.shape, array.shape, strict=True)
        )
        if not fits:
            raise RunnerError(f"Input '{spec.name}' has shape {array.shape}; the model takes {spec.shape}.")


def fixed_batch(runner: Runner) -> int | None:
    """Dimension 0 of the model's first input where the model fixes it; None where it is open or not declared."""
    specs: Sequence[TensorSpec] = getattr(runner, "inputs", ())
    return specs[0].shape[0] if specs and specs[0].shape else None


def run_in_batches(runner: Runner, inputs: Mapping[str, Array], batch_size: int, pad_last: bool = False) -> Arrays:
    """Run a long set in batches along dimension 0 and join the outputs.

    Args:
        runner: executes one batch.
        inputs: arrays that share dimension 0, of N samples.
        batch_size: samples a batch.
        pad_last: repeat the last sample to fill a partial last batch and drop the extra results, for a model
            with a fixed batch.

    Returns:
        Every output with dimension 0 of N.

    Raises:
        RunnerError: no samples, or arrays of different lengths.
    """
    lengths = {name: len(array) for name, array in inputs.items()}
    if not lengths or len(set(lengths.values())) != 1 or 0 in lengths.values() or batch_size < 1:
        raise RunnerError(f"Cannot batch inputs of lengths {lengths} by {batch_size}: give equal lengths, at least 1.")
    total = next(iter(lengths.values()))
    parts: dict[str, list[Array]] = {}
    for start in range(0, total, batch_size):
        batch = {name: array[start : start + batch_size] for name, array in inputs.items()}
        outputs = run_padded(runner, batch, batch_size) if pad_last else runner.run(batch)
        for name, array in outputs.items():
            parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def run_padded(runner: Runner, batch: Mapping[str, Array], size: int) -> Arrays:
    """Run a batch of at most `size` samples as one of exactly `size`: the last sample is repeated, and what comes of
    the repetitions is dropped. A partial last batch so runs with the shapes of the others.
    """
    valid = len(next(iter(batch.values())))
    if valid < size:
        batch = {n: np.concatenate([a, np.repeat(a[-1:], size - valid, axis=0)]) for n, a in batch.items()}
    return {name: array[:valid] for name, array in runner.run(batch).items()}
