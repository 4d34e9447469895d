"""AdaRound: weights rounded so that layers give what they gave in float, not each to its nearest integer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat.calibration import Forward, run_batch
from qat.modes import evaluation_mode, passing_through
from qat.ptq.following import Function, functions_behind
from qat.ptq.rounding import LayerData, Rounding, RoundingConfig, learn_rounding
from qat.ptq.running import batches_on_device, example_of, forward_hooks, quantized_layers
from qat.quantizer import named_quantizers

logger = logging.getLogger("qat")


@dataclass(frozen=True)
class AdaRoundReport:
    """What `adaround` did.

    Attributes:
        rounded: by layer, in the order of execution, the errors before and after.
        skipped: layer to the reason why it is rounded to nearest.
    """

    rounded: dict[str, Rounding] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


class _ReachedError(Exception):
    """A forward is ended where the layer in question has run."""


@torch.no_grad()
def adaround(
    model: nn.Module,
    batches: Iterable[Any],
    config: RoundingConfig | None = None,
    *,
    num_batches: int | None = None,
    reference: nn.Module | None = None,
    forward: Forward = run_batch,
    progress: bool = True,
) -> AdaRoundReport:
    """Learn for each weight whether it is rounded up or down, layer by layer, in place.

    AdaRound (Nagel et al. 2020, equations 21 to 25): a layer's output behind its BatchNorm and activation, on the
    inputs that it gets in the quantized model, is brought as near as possible to that of the float model. The result
    is baked in: each weight becomes a multiple of its scale, so that rounding to nearest, in torch, ONNX Runtime and
    TensorRT, gives the learned integer. Do not calibrate again
    afterwards. On a CPU the same seed gives the same weights; on a GPU up to the order in which convolutions add.

    Args:
        model: calibrated model; its biases and scales stay.
        batches: tensors, (inputs, ...) sequences or keyword mappings; each rank may have its own, gradients are
            averaged. Two forwards per layer and batch collect a layer's tensors.
        config: steps, samples, learning rate; None for the defaults.
        num_batches: how many batches to take, None for all.
        reference: model of the same layers that gives the float outputs; None for a copy of `model` with its
            quantizers passing through.
        forward: how one batch is run.

    Raises:
        CalibrationError: no batches, or no quantized layer.
    """
    config = config or RoundingConfig()
    kept = batches_on_device(model, batches, num_batches)
    layers, skipped = quantized_layers(model)
    teacher = copy.deepcopy(model) if reference is None else reference
    report = AdaRoundReport(skipped=skipped)
    generator = torch.Generator().manual_seed(config.seed)
    with ExitStack() as stack:
        for one in (model, teacher):
            stack.enter_context(evaluation_mode(one))
        stack.enter_context(passing_through([quantizer for _, quantizer in named_quantizers(teacher)]))
        behind = functions_behind(model, example_of(kept[0]))
        names = {layer: name for name, layer in layers.items()}
        order = [names[layer] for layer in behind if layer in names]
        bar = stack.enter_context(
            tqdm(total=len(order) * config.steps, desc="AdaRound", disable=not progress, leave=False)
        )
        for number, name in enumerate(order):
            bar.set_postfix_str(name)
            data = _collect(model, teacher, name, kept, forward, config.samples, behind[layers[name]])
            if isinstance(data, str):
                report.skipped[name] = data
                continue
            report.rounded[name] = learn_rounding(
                layers[name], data, behind[layers[name]], config, generator, bar.update
            )
            bar.update((number + 1) * config.steps - bar.n)
    unreached = dict.fromkeys(name for name in layers if name not in order)
    report.skipped.update(dict.fromkeys(unreached, "it is called more than once in a forward, or never"))
    if report.skipped:
        logger.warning("rounded to nearest: %s", report.skipped)
    return report


def _collect(
    model: nn.Module,
    teacher: nn.Module,
    name: str,
    batches: Sequence[Any],
    forward: Forward,
    limit: int,
    functions: Sequence[Function],
) -> LayerData | str:
    """The layer's tensors, or why they cannot be had."""
    inputs = _reach(model, name, batches, forward, limit, of_input=True)
    targets = _reach(teacher, name, batches, forward, limit, of_input=False)
    if len({t.shape[1:] for t in inputs}) != 1:
        return "its inputs have different shapes"
    joined = torch.cat(targets)[:limit]
    for function in functions:
        joined = function(joined)
    return LayerData(torch.cat(inputs)[:limit], joined)


def _reach(
    model: nn.Module, name: str, batches: Sequence[Any], forward: Forward, limit: int, of_input: bool
) -> list[Tensor]:
    """Inputs or outputs of a layer, batch by batch, until there are `limit` samples."""
    found: list[Tensor] = []

    def hook(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.append(inputs[0] if of_input else output)
        raise _ReachedError

    with forward_hooks([(model.get_submodule(name), hook)]):
        for batch in batches:
            with suppress(_ReachedError):
                forward(model, batch)
            if sum(len(t) for t in found) >= limit:
                break
    return found
