"""Calibrating a whole model: collect statistics, compute every amax, compare methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat.errors import CalibrationError
from qat.modes import evaluation_mode
from qat.quantizer import QuantizerState, TensorQuantizer, name_quantizers, named_quantizers, set_quantizer_state

logger = logging.getLogger("qat")
METHODS = ("max", "entropy", "mse", "percentile")
UNSEEN = "no tensor reached it during calibration"
Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class CalibrationReport:
    """What calibration found.

    Attributes:
        method: method used for activations, weights always take the maximum.
        quantizers: number of quantizers that have an amax now.
        dead: quantizer name to the channels (0 for a per-tensor one) whose values were all (almost) zero.
        unseen: quantizers that no tensor reached, left float.
    """

    method: str
    quantizers: int
    dead: dict[str, list[int]]
    unseen: tuple[str, ...]


@dataclass(frozen=True)
class MethodResult:
    """Metrics of a model calibrated by one method, e.g. "percentile=99.9"."""

    method: str
    metrics: dict[str, float]


def parse_method(text: str) -> tuple[str, dict[str, float]]:
    """Split "percentile=99.9" into its name and options; "max", "entropy" and "mse" have none.

    Raises:
        CalibrationError: unknown method, or a percentile that is not a number.
    """
    name, _, value = text.partition("=")
    if name not in METHODS or (value and name != "percentile"):
        raise CalibrationError(f"calibration method {text!r} is unknown. Known: {', '.join(METHODS)}, percentile=99.9.")
    try:
        return name, {"percentile": float(value)} if value else {}
    except ValueError as error:
        raise CalibrationError(f"calibration method {text!r}: {value!r} is not a number.") from error


def use_histograms(model: nn.Module) -> None:
    """Give every per-tensor activation quantizer that collects maxima a histogram instead."""
    for _, quantizer in named_quantizers(model):
        d = quantizer.descriptor
        if d.axis is None and not d.narrow_range and d.calib_method == "max":
            quantizer.descriptor = replace(d, calib_method="histogram")
            quantizer.calibrator = None


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of tensors in tuples, lists and mappings, moved."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [to_device(value, device) for value in batch]
    return batch


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call the model with a mapping's keywords, a sequence's first element (inputs, targets), or the tensor itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, list | tuple) else batch)


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with every quantizer CALIBRATING inside; modes and states are restored, also after an error."""
    states = [(q, q.state, q.reason) for _, q in named_quantizers(model)]
    with evaluation_mode(model):
        set_quantizer_state(model, QuantizerState.CALIBRATING)
        try:
            yield
        finally:
            for quantizer, state, reason in states:
                quantizer.set_state(state, reason)


@torch.no_grad()
def collect_stats(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    num_batches: int | None = None,
    forward: Forward = run_batch,
    progress: bool = True,
) -> int:
    """Show batches to the float model and let every quantizer collect statistics, afresh.

    Args:
        batches: tensors, (inputs, ...) sequences or keyword mappings; moved to the model's device.
        num_batches: how many to take, None for all.
        forward: how one batch is run.

    Returns:
        The number of batches run.

    Raises:
        CalibrationError: there are no quantizers or no batches.
    """
    name_quantizers(model)
    quantizers = list(named_quantizers(model))
    if not quantizers:
        raise CalibrationError("the model has no quantizers. Call qat.quantize_(model) first.")
    for _, quantizer in quantizers:
        if quantizer.calibrator is not None:
            quantizer.calibrator.reset()
        if quantizer.reason == UNSEEN:
            quantizer.set_state(QuantizerState.QUANTIZING)
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    count = 0
    with calibrating(model):
        for batch in tqdm(
            islice(batches, num_batches), "calibrate", total=num_batches, disable=not progress, leave=False
        ):
            forward(model, to_device(batch, device))
            count += 1
    if not count:
        raise CalibrationError("there were no calibration batches. Check the data folder and the number of batches.")
    return count


def compute_amax(
    model: nn.Module, method: str = "max", unseen: Literal["error", "float"] = "error", **options: float
) -> CalibrationReport:
    """Compute every amax from the collected statistics and switch the quantizers to QUANTIZING.

    Args:
        method: "max", "entropy", "mse", "percentile" (option `percentile`) or "percentile=99.9".
        unseen: what to do with a quantizer that no tensor reached: raise, or leave its tensor float and say so.

    Raises:
        CalibrationError: NaN or Inf in a batch, or unseen quantizers; the message names layer and batch.
    """
    name, parsed = parse_method(method)
    options = {**parsed, **options}
    missing: list[str] = []
    dead: dict[str, list[int]] = {}
    count = 0
    for label, quantizer in named_quantizers(model):
        if quantizer.state is QuantizerState.PASSTHROUGH and quantizer.reason:
            continue
        if not _load(quantizer, name, options):
            missing.append(label)
            continue
        quantizer.set_state(QuantizerState.QUANTIZING)
        count += 1
        if quantizer.dead:
            dead[label] = quantizer.dead
    if missing and unseen == "error":
        raise CalibrationError(
            f"no tensor reached these quantizers during calibration: {', '.join(missing)}. Their layers were "
            "not run, or their weights are read directly. Exclude them in quantize_(), calibrate with inputs that "
            "reach them, or pass unseen='float'."
        )
    for label, quantizer in named_quantizers(model):
        if label in missing:
            quantizer.set_state(QuantizerState.PASSTHROUGH, UNSEEN)
    if missing:
        logger.warning("left float, no tensor reached them during calibration: %s", ", ".join(missing))
    if dead:
        logger.warning("all zero during calibration, so given the smallest scale: %s", dead)
    return CalibrationReport(method, count, dead, tuple(missing))


def _load(quantizer: TensorQuantizer, method: str, options: dict[str, Any]) -> bool:
    """Load amax; False where no tensor was seen."""
    if quantizer.fixed:
        return True
    calibrator = quantizer.calibrator
    if calibrator is None:
        return False
    methods = getattr(calibrator, "methods", ())
    chosen = method if method in methods else None
    return quantizer.load_calib_amax(chosen, **(options if chosen == "percentile" else {}))


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "max",
    *,
    num_batches: int | None = None,
    forward: Forward = run_batch,
    unseen: Literal["error", "float"] = "error",
    progress: bool = True,
) -> CalibrationReport:
    """Calibrate activations by `method` and weights by their maximum: `collect_stats`, then `compute_amax`."""
    if parse_method(method)[0] != "max":
        use_histograms(model)
    collect_stats(model, batches, num_batches=num_batches, forward=forward, progress=progress)
    return compute_amax(model, method, unseen)


calibrate_model = calibrate
"""The name pytorch-quantization's examples use."""


def compare_methods(
    model: nn.Module,
    evaluate: Callable[[nn.Module], dict[str, float]],
    metric: str,
    methods: Sequence[str] = METHODS,
    unseen: Literal["error", "float"] = "error",
) -> list[MethodResult]:
    """Compute, load and evaluate each method on statistics collected once, and leave the best one loaded.

    Collect first: `use_histograms(model)`, then `collect_stats(model, batches)`.

    Args:
        evaluate: metrics of the model as it stands.
        metric: the metric whose largest value is best; of equals the earlier method.

    Returns:
        One result per method, in the order given.
    """
    results = []
    for method in methods:
        compute_amax(model, method, unseen)
        results.append(MethodResult(method, evaluate(model)))
    best = max(results, key=lambda result: result.metrics[metric])
    compute_amax(model, best.method, unseen)
    return results
