"""Bias correction: the mean error that quantization adds to each output channel is taken out of the bias."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat.calibration import Forward, run_batch
from qat.modes import evaluation_mode, passing_through
from qat.ptq.following import norms_behind
from qat.ptq.running import (
    average_over_ranks,
    batches_on_device,
    channel_dim,
    example_of,
    forward_hooks,
    quantized_layers,
)
from qat.quantizer import named_quantizers

logger = logging.getLogger("qat")


@dataclass(frozen=True)
class BiasReport:
    """What `correct_biases` did.

    Attributes:
        corrected: layer to the root mean square of the shift over its channels, in units of its output.
        skipped: layer to the reason why its mean error stays.
    """

    corrected: dict[str, float]
    skipped: dict[str, str]


@torch.no_grad()
def correct_biases(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    num_batches: int | None = None,
    reference: nn.Module | None = None,
    forward: Forward = run_batch,
    progress: bool = True,
) -> BiasReport:
    """Shift each quantized layer's bias so that its mean output is the float model's, in place.

    Empirical bias correction (Nagel et al. 2019, section 4.2 and appendix D): E[quantized] - E[float] per output
    channel is subtracted. Layers are corrected in the order of execution, each with the corrections of those in front
    of it, within every batch; the mean over batches is written. A layer without bias whose output a BatchNorm
    alone reads is corrected in that BatchNorm's running mean.

    Args:
        model: calibrated model.
        batches: tensors, (inputs, ...) sequences or keyword mappings; each rank may have its own.
        num_batches: how many to take, None for all.
        reference: model of the same layers that gives the float means, where the weights of `model` were changed
            (`adaround`); None for `model` itself with its quantizers passing through.
        forward: how one batch is run.

    Raises:
        CalibrationError: no batches, or no quantized layer.
    """
    kept = batches_on_device(model, batches, num_batches)
    layers, skipped = quantized_layers(model)
    places = _bias_places(model, layers, example_of(kept[0]))
    unplaced = (name for name in layers if name not in places)
    skipped |= dict.fromkeys(unplaced, "it has no bias, and no BatchNorm alone reads its output")
    totals: dict[str, Tensor] = {}
    with evaluation_mode(model), evaluation_mode(reference or model):
        for batch in tqdm(kept, "correct biases", disable=not progress, leave=False):
            expected = _float_means(reference or model, list(places), batch, forward)
            for name, shift in _shifts(model, places, expected, batch, forward).items():
                totals[name] = totals.get(name, torch.zeros_like(shift)) + shift
    corrected = {}
    for name, total in totals.items():
        shift = total / len(kept)
        average_over_ranks(shift)
        target, sign = places[name]
        target.add_((sign * shift).to(target.dtype))
        corrected[name] = shift.square().mean().sqrt().item()
    skipped |= {name: "no tensor reached it" for name in places if name not in totals}
    if skipped:
        logger.warning("biases not corrected: %s", skipped)
    return BiasReport(corrected, skipped)


def _bias_places(model: nn.Module, layers: dict[str, nn.Module], example: Any) -> dict[str, tuple[Tensor, int]]:
    """By layer the tensor that a shift is added to, and with which sign."""
    places: dict[str, tuple[Tensor, int]] = {}
    norms = norms_behind(model, example)
    for name, layer in layers.items():
        bias, norm = layer.bias, norms.get(layer)
        if isinstance(bias, Tensor):
            places[name] = (bias, -1)
        elif norm is not None:
            places[name] = (norm.running_mean, 1)  # type: ignore[assignment]
    return places


def _mean(layer: nn.Module, output: Tensor) -> Tensor:
    """Mean of each channel, float64, shape (channels,)."""
    return output.movedim(channel_dim(layer), 0).flatten(1).double().mean(1)


def _float_means(model: nn.Module, names: list[str], batch: Any, forward: Forward) -> dict[str, list[Tensor]]:
    """Channel means of each layer's output in the float model, call by call."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    hooks = [
        (model.get_submodule(name), lambda layer, _inputs, output, name=name: found[name].append(_mean(layer, output)))
        for name in names
    ]
    # append gives None, so the hooks change nothing.
    with ExitStack() as stack:
        stack.enter_context(passing_through([quantizer for _, quantizer in named_quantizers(model)]))
        stack.enter_context(forward_hooks(hooks))
        forward(model, batch)
    return found


def _shifts(
    model: nn.Module, names: Iterable[str], expected: dict[str, list[Tensor]], batch: Any, forward: Forward
) -> dict[str, Tensor]:
    """Mean error of each layer's output, those of the layers in front of it taken out; the mean over calls."""
    found: dict[str, list[Tensor]] = defaultdict(list)

    def correct(name: str) -> Any:
        def hook(layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            shift = _mean(layer, output) - expected[name][len(found[name])]
            found[name].append(shift)
            shape = [1] * output.dim()
            shape[channel_dim(layer)] = -1
            return output - shift.to(output.dtype).reshape(shape)

        return hook

    with forward_hooks((model.get_submodule(name), correct(name)) for name in names):
        forward(model, batch)
    return {name: torch.stack(shifts).mean(0) for name, shifts in found.items()}
