"""What comes out of a model over many batches, and how far another model is away from it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from qat.errors import RunnerError
from qat.runtime.runner import Array
from qat.sqnr import Sqnr


class OutputSummary:
    """Range of one output, and its distance from a reference; batch by batch."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.count = 0
        self.low, self.high = math.inf, -math.inf
        self.sqnr = Sqnr()
        self.difference = 0.0
        self._same = 0

    def add(self, array: Array, reference: Array | None = None) -> None:
        """Count one batch; dimension 0 is the batch.

        Raises:
            RunnerError: the reference has another shape.
        """
        self.shape, self.count = array.shape[1:], self.count + len(array)
        if array.size:
            self.low, self.high = min(self.low, float(array.min())), max(self.high, float(array.max()))
        if reference is None:
            return
        if array.shape != reference.shape:
            raise RunnerError(f"An output has shape {array.shape} in one model and {reference.shape} in the other.")
        ours, theirs = array.astype(np.float64), reference.astype(np.float64)
        self.sqnr.add(torch.from_numpy(theirs), torch.from_numpy(ours))
        if array.size:
            self.difference = max(self.difference, float(np.abs(ours - theirs).max()))
        if array.ndim == 2:
            self._same += int((ours.argmax(1) == theirs.argmax(1)).sum())

    @property
    def same_top1(self) -> float | None:
        """Percent of the samples whose largest value is at the same place; None for anything but [N, classes]."""
        return 100.0 * self._same / self.count if len(self.shape) == 1 and self.count else None

    def row(self, compared: bool) -> list[str]:
        """Shape of a sample, smallest and largest value; if compared, largest difference, SQNR and same top-1."""
        row = ["x".join(map(str, self.shape)) or "scalar", f"{self.low:.5g}", f"{self.high:.5g}"]
        if compared:
            same = "-" if self.same_top1 is None else f"{self.same_top1:.2f}"
            row += [f"{self.difference:.3g}", f"{self.sqnr.db:.1f}", same]
        return row


def summarize_outputs(
    summaries: dict[str, OutputSummary], outputs: Mapping[str, Array], references: Mapping[str, Array] | None = None
) -> None:
    """Count one batch of every output.

    Raises:
        RunnerError: the references lack an output, or a shape differs.
    """
    for name, array in outputs.items():
        if references is not None and name not in references:
            raise RunnerError(f"Output '{name}' is not among those of the other model, {list(references)}.")
        summary = summaries.setdefault(name, OutputSummary())
        summary.add(array, None if references is None else references[name])
