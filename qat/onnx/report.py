"""What a comparison of a file with torch found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qat.sqnr import decibel


@dataclass(frozen=True)
class LayerParity:
    """One quantizer or graph output, given torch's own inputs.

    Attributes:
        name: the quantizer's module name, or the output's name.
        kind: "activation", "weight" or "output".
        max_abs: largest difference in the float computation that ends here.
        relative: max_abs over the tensor's largest magnitude (or the quantizer's amax, if larger).
        mismatched: elements whose quantized value differs although the quantizer was given the same input.
        passed: relative is within the tolerance and mismatched is 0.
    """

    name: str
    kind: str
    max_abs: float
    relative: float
    mismatched: int
    passed: bool

    def __str__(self) -> str:
        codes = f", {self.mismatched} quantized values differ" if self.mismatched else ""
        return f"{self.kind} '{self.name}' differs by {self.max_abs:.3g} ({self.relative:.2e} of its range){codes}"


@dataclass(frozen=True)
class OutputParity:
    """One output over all batches, each side running by itself.

    Attributes:
        name: graph output.
        max_abs: largest difference.
        relative: max_abs over the range (maximum - minimum) of torch's output.
        sqnr_db: 10 log10(sum torch^2 / sum difference^2); infinite where they are equal.
        argmax_agreement: share of equal argmax along dimension 1, None for outputs that have none.
        passed: shapes are equal and the difference is finite.
    """

    name: str
    max_abs: float
    relative: float
    sqnr_db: float
    argmax_agreement: float | None
    passed: bool


@dataclass(frozen=True)
class ParityReport:
    """Result of `check_parity`.

    Attributes:
        outputs: end-to-end numbers; rounding that flips a code travels on, so these are reported, not judged.
        layers: the judged comparison, failing layers first, each group in execution order.
        unmatched: quantizers whose calls in torch and in the file could not be paired; they were not compared.
        tolerance: largest `relative` that passes.
        batches: how many were compared end to end.
    """

    outputs: tuple[OutputParity, ...]
    layers: tuple[LayerParity, ...]
    unmatched: tuple[str, ...]
    tolerance: float
    batches: int

    @property
    def passed(self) -> bool:
        """True where nothing differs by more than rounding."""
        return all(row.passed for row in self.outputs) and all(row.passed for row in self.layers)

    def worst(self) -> str:
        """One sentence: the first layer that differs, else the first output."""
        for layer in self.layers:
            if not layer.passed:
                note = f"; not compared: {', '.join(self.unmatched)}" if self.unmatched else ""
                return f"first at {layer}{note}"
        bad = [row for row in self.outputs if not row.passed]
        if bad:
            return f"output '{bad[0].name}' has another shape or a difference that is not finite"
        return "nothing"

    def table(self) -> str:
        """Text table of the layers."""
        rows = [f"{'':4} {'kind':10} {'max abs':>10} {'relative':>10} {'differ':>8}  name"]
        for row in self.layers:
            numbers = f"{row.max_abs:10.3g} {row.relative:10.2e} {row.mismatched:8d}"
            rows.append(f"{'ok' if row.passed else 'FAIL':4} {row.kind:10} {numbers}  {row.name}")
        return "\n".join(rows)


@dataclass
class OutputTotals:
    """Sums behind an OutputParity, batch by batch."""

    name: str
    max_abs: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    signal: float = 0.0
    noise: float = 0.0
    hits: int = 0
    votes: int = 0
    fits: bool = True

    def add(self, reference: Tensor, other: Tensor) -> float:
        """Count one batch; returns its own SQNR in dB."""
        if reference.shape != other.shape:
            self.fits = False
            return -math.inf
        a, b = reference.double(), other.double()
        difference = a - b
        signal, noise = float(a.square().sum()), float(difference.square().sum())
        self.signal, self.noise = self.signal + signal, self.noise + noise
        if a.numel():
            self.max_abs = max(self.max_abs, float(difference.abs().max()))
            self.low, self.high = min(self.low, float(a.min())), max(self.high, float(a.max()))
        if a.dim() > 1 and a.shape[1] > 1 and reference.is_floating_point():
            agree = a.argmax(1) == b.argmax(1)
            self.hits, self.votes = self.hits + int(agree.sum()), self.votes + agree.numel()
        self.fits = self.fits and math.isfinite(noise)
        return decibel(signal, noise)

    def result(self) -> OutputParity:
        """The finished row."""
        spread = self.high - self.low
        relative = self.max_abs / spread if spread > 0 else (0.0 if self.max_abs == 0 else math.inf)
        agreement = self.hits / self.votes if self.votes else None
        return OutputParity(self.name, self.max_abs, relative, decibel(self.signal, self.noise), agreement, self.fits)


@dataclass
class LayerTotals:
    """Worst numbers behind a LayerParity."""

    name: str
    kind: str
    max_abs: float = 0.0
    relative: float = 0.0
    mismatched: int = 0

    def add_float(self, reference: Tensor, other: Tensor, floor: float) -> None:
        """Compare a float result; `floor` is the least magnitude to relate the difference to."""
        if reference.shape != other.shape or not bool(torch.isfinite(other).all()):
            self.relative = self.max_abs = math.inf
            return
        if not reference.numel():
            return
        worst = float((reference.double() - other.double()).abs().max())
        size = max(float(reference.abs().max()), floor)
        self.max_abs = max(self.max_abs, worst)
        self.relative = max(self.relative, worst / size if size > 0 else (0.0 if worst == 0 else math.inf))

    def add_codes(self, reference: Tensor, other: Tensor) -> None:
        """Count values that are not equal."""
        fits = reference.shape == other.shape
        self.mismatched += int((reference != other.to(reference.dtype)).sum()) if fits else reference.numel()

    def result(self, tolerance: float) -> LayerParity:
        """The finished row."""
        passed = self.relative <= tolerance and self.mismatched == 0
        return LayerParity(self.name, self.kind, self.max_abs, self.relative, self.mismatched, passed)


def ordered(rows: Sequence[LayerParity]) -> tuple[LayerParity, ...]:
    """Failing layers first; execution order within each group, so the first divergence leads."""
    return tuple(sorted(rows, key=lambda row: row.passed))
