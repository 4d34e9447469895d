"""The cells of a comparison: one model on one backend, with what was measured and why the rest is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from qat.errors import ConfigError, QatError, RunnerError

TORCH, ORT, TENSORRT = BACKENDS = ("torch", "ONNX Runtime", "TensorRT")
FP32, FP16 = "FP32", "FP16"
Metrics = dict[str, float]


@dataclass(frozen=True)
class Measuring:
    """How latency is measured.

    Attributes:
        batches: batch sizes.
        iterations: runs that count; at most so many on torch and ONNX Runtime.
        seconds: about how long one measurement on torch or ONNX Runtime may take; 3 runs are always made.
        compile_torch: time torch through torch.compile.
    """

    batches: tuple[int, ...]
    iterations: int = 100
    seconds: float = 3.0
    compile_torch: bool = False

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or self.iterations < 1:
            raise ConfigError(
                f"--batches={list(self.batches)} --iterations={self.iterations}: give at least one batch size, and "
                "nothing below 1."
            )


@dataclass
class Cell:
    """One model on one backend. What could not be measured is missing, and `why` says why.

    Attributes:
        sha256: of the ONNX file with this model's weights; "" where there is none.
        bytes: of the ONNX file that the backend runs; for torch, of the weights in memory.
        metrics: top1 and top5 in percent, val_loss.
        latency: batch size -> `Latency` as plain values; on a GPU of the execution without copies.
        engine: what was built (`BuiltEngine.to_dict`).
        timings: on a GPU: batch size -> part ("execution", "with_copies", "cuda_graph") -> `Latency` as plain values.
        why: "file", "accuracy", "engine", "execution" or "batch N" -> why it is missing.
    """

    model: str
    backend: str
    sha256: str = ""
    bytes: int | None = None
    metrics: Metrics | None = None
    latency: dict[str, dict[str, Any]] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, dict[str, Any]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """An error inside becomes the reason why this part is missing; the other cells go on."""
        try:
            yield
        except (QatError, RuntimeError, MemoryError) as error:
            self.why[name] = " ".join((str(error) or repr(error)).split())[:500]


def finite(metrics: Metrics) -> Metrics:
    """The metrics; RunnerError where the logits were NaN or infinite, as an accuracy would say nothing then."""
    if not all(map(math.isfinite, metrics.values())):
        raise RunnerError("the logits are NaN or infinite: values leave the range of this precision.")
    return metrics
