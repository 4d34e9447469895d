"""BatchNorm re-estimation: the running statistics of a quantized model, measured anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat.calibration import Forward, run_batch
from qat.errors import CalibrationError
from qat.modes import evaluation_mode
from qat.ptq.running import average_over_ranks, batches_on_device


def batch_norms(model: nn.Module) -> dict[str, Any]:
    """Every BatchNorm with running statistics, by name."""
    found = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return {name: module for name, module in found if module.running_mean is not None}


@torch.no_grad()
def reestimate_batch_norm(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    num_batches: int | None = None,
    forward: Forward = run_batch,
    progress: bool = True,
) -> tuple[str, ...]:
    """Replace the running mean and variance of each BatchNorm by the mean over batches, in place.

    Quantization shifts the statistics of what a BatchNorm reads, and the running ones are those of the float model, or
    lag behind weights that oscillate (Nagel et al. 2022). Means of batch statistics are taken as by Wu
    and Johnson 2021 ("precise BatchNorm"). Only the BatchNorms are in training mode; dropout is not.

    Args:
        model: calibrated or fine-tuned model; a float one is taken too.
        batches: tensors, (inputs, ...) sequences or keyword mappings, in size and augmentation as in training, where
            the statistics come from; each rank may have its own.
        num_batches: how many to take, None for all.
        forward: how one batch is run.

    Returns:
        Names of the BatchNorms.

    Raises:
        CalibrationError: no batches, or the model has no BatchNorm with running statistics.
    """
    norms = batch_norms(model)
    if not norms:
        raise CalibrationError(
            f"{type(model).__name__} has no BatchNorm with running statistics; it may have been folded. Correct the "
            "biases instead, or re-estimate before folding."
        )
    kept = batches_on_device(model, batches, num_batches)
    before = {norm: [t.clone() for t in _statistics(norm)] for norm in norms.values()}
    momenta = {norm: norm.momentum for norm in before}
    unseen = set(before)
    try:
        with evaluation_mode(model):
            for norm in before:
                norm.reset_running_stats()
                norm.momentum = None  # the mean of all batches
                norm.train()
            for batch in tqdm(kept, "re-estimate BatchNorm", disable=not progress, leave=False):
                forward(model, batch)
        unseen = {norm for norm in before if not norm.num_batches_tracked}
    finally:
        for norm, (mean, variance, count) in before.items():
            norm.momentum = momenta[norm]
            norm.num_batches_tracked.copy_(count)
            if norm in unseen:  # all of them after an error
                norm.running_mean.copy_(mean)
                norm.running_var.copy_(variance)
    average_over_ranks(*(t for norm in before for t in (norm.running_mean, norm.running_var)))
    return tuple(name for name, norm in norms.items() if norm not in unseen)


def _statistics(norm: Any) -> list[Tensor]:
    return [norm.running_mean, norm.running_var, norm.num_batches_tracked]
