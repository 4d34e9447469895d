"""The steps after calibration in one call, in an order in which each can use what the ones before it left."""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from qat.calibration import Forward, run_batch
from qat.errors import ConfigError
from qat.ptq.adaround import adaround
from qat.ptq.batch_norm import batch_norms, reestimate_batch_norm
from qat.ptq.bias_correction import correct_biases
from qat.ptq.rounding import RoundingConfig
from qat.ptq.running import batches_on_device

logger = logging.getLogger("qat")
STEPS = ("equalize", "adaround", "correct_bias", "reestimate_bn")
"""All there are, in the order they are done; "equalize" comes before calibration, the others after it."""


def ordered_steps(steps: Iterable[str]) -> tuple[str, ...]:
    """The steps in the order of STEPS, each once.

    Raises:
        ConfigError: an unknown step.
    """
    chosen = set(steps)
    for step in sorted(chosen - set(STEPS)):
        near = difflib.get_close_matches(step, STEPS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown step {step!r} to improve PTQ. Known: {', '.join(STEPS)}. {hint}".strip())
    return tuple(step for step in STEPS if step in chosen)


def improve(
    model: nn.Module,
    batches: Iterable[Any],
    steps: Sequence[str],
    *,
    num_batches: int | None = None,
    norm_batches: Iterable[Any] | None = None,
    rounding: RoundingConfig | None = None,
    forward: Forward = run_batch,
    progress: bool = True,
    after: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Do the steps to a calibrated model in place: rounding first, then the mean error it leaves, then statistics.

    The float outputs that rounding and bias correction aim at are those of the model as it is given.

    Args:
        model: calibrated model.
        batches: as for `qat.calibrate`.
        steps: of "adaround", "correct_bias" and "reestimate_bn"; done in that order whatever theirs.
        num_batches: how many batches to take, None for all.
        norm_batches: batches for "reestimate_bn", as in training, augmentation included; None for `batches`.
        rounding: settings of `adaround`.
        forward: how one batch is run.
        after: called with the name of each step that was done.

    Returns:
        What each step returned, by name. `reestimate_bn` is left out, with a warning, where no BatchNorm is left.

    Raises:
        ConfigError: an unknown step, or "equalize", which comes before calibration.
        CalibrationError: no batches, or no quantized layer.
    """
    chosen = ordered_steps(steps)
    if "equalize" in chosen:
        raise ConfigError("step 'equalize' changes activations. Call qat.ptq.equalize on the float model instead.")
    kept = batches_on_device(model, batches, num_batches)
    reference = copy.deepcopy(model)
    shared: dict[str, Any] = {"forward": forward, "progress": progress}
    results: dict[str, Any] = {}
    for step in chosen:
        if step == "adaround":
            results[step] = adaround(model, kept, rounding, reference=reference, **shared)
        elif step == "correct_bias":
            results[step] = correct_biases(model, kept, reference=reference, **shared)
        elif batch_norms(model):
            results[step] = reestimate_batch_norm(model, kept if norm_batches is None else norm_batches, **shared)
        else:
            logger.warning("reestimate_bn: no BatchNorm is left to re-estimate; it was folded or never there")
            continue
        if after is not None:
            after(step)
    return results
