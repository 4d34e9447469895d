"""Cross-layer equalization: channels of like range, so that one scale suits all of them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qat.distributed import all_reduce_max
from qat.errors import ConfigError
from qat.modes import full_precision, passing_through
from qat.placement.folding import fold_batch_norm_
from qat.placement.tracing import call_arguments, run_once, tensors_in, trace
from qat.ptq.channels import Side, channel_range, multiply_channels
from qat.ptq.scaling_groups import ScalingGroup, scaling_groups
from qat.quantizer import named_quantizers

logger = logging.getLogger("qat")
SWEEPS = 100
TOLERANCE = 1e-3


@dataclass(frozen=True)
class EqualizationReport:
    """What `equalize` did.

    Attributes:
        equalized: (layers that write, layers that read) of each group of tensors that was scaled.
        skipped: each layer whose output keeps its scale, with the reason.
        folded: layers that took up a BatchNorm.
        replaced: ReLU6 modules that are ReLU now.
    """

    equalized: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    skipped: dict[str, str]
    folded: tuple[str, ...]
    replaced: tuple[str, ...]


def equalize(model: nn.Module, example_inputs: Any, *, replace_relu6: bool = False) -> EqualizationReport:
    """Scale the channels between layers so that their weight ranges agree on both sides, in place.

    Cross-layer equalization (Nagel et al. 2019, section 4.1): for s > 0 relu(s x) = s relu(x), so an output channel can
    be divided by s_i and the channels that read it multiplied, and with s_i = sqrt(p1_i / p2_i) channel i takes the
    same part p of its layer's range in both. It helps where weights have one scale per tensor. Here the layers may be
    many on each side (residual adds, gates, depthwise chains). In the place of the paper's absorption of high
    biases no channel is scaled beyond the largest activation that its tensor had. BatchNorm is folded first
    (`qat.fold_batch_norm_`). The model computes what it did, which is checked on the example inputs.

    Args:
        model: float, or prepared and not yet calibrated: its activations change.
        example_inputs: as for `qat.prepare`; real data, since ranges of activations are measured.
        replace_relu6: make every nn.ReLU6 an nn.ReLU, as the paper does; it changes what the model computes above 6.
            Otherwise a ReLU6 is an obstacle.

    Raises:
        ConfigError: the model is calibrated, does not run, or computes something else afterwards, because its weights
            are read where no trace sees it; the model is then as it was, BatchNorm and ReLU6 apart.
    """
    if any(quantizer.calibrated and not quantizer.fixed for _, quantizer in named_quantizers(model)):
        raise ConfigError("the model is calibrated, and equalize changes its activations. Equalize first.")
    replaced = _replace_relu6(model) if replace_relu6 else ()
    with passing_through([quantizer for _, quantizer in named_quantizers(model)]), full_precision():
        folded = fold_batch_norm_(model, example_inputs)
        groups = scaling_groups(model, trace(model, example_inputs))
        usable = [group for group in groups if not group.obstacle and group.producers and group.consumers]
        before, activations = _measure(model, example_inputs, usable)
        layers = {name: model.get_submodule(name) for group in usable for name in (*group.producers, *group.consumers)}
        originals = {name: copy.deepcopy(layer.state_dict()) for name, layer in layers.items()}
        _scale(layers, usable, activations)
        after, _ = _measure(model, example_inputs, ())
    if not all(_close(a, b) for a, b in zip(after, before, strict=True)):
        for name, layer in layers.items():
            layer.load_state_dict(originals[name])
        raise ConfigError(
            f"{type(model).__name__} computes something else when its channels are scaled: a weight or tensor is read "
            "in code that the trace does not see. Leave equalize out for this model."
        )
    done = tuple((tuple(group.producers), tuple(group.consumers)) for group in usable)
    skipped = _skipped(groups, usable)
    if skipped:
        logger.info("not equalized: %s", skipped)
    return EqualizationReport(done, skipped, folded, replaced)


def _skipped(groups: Sequence[ScalingGroup], usable: Sequence[ScalingGroup]) -> dict[str, str]:
    left = [group for group in groups if group not in usable]
    return {name: group.obstacle or "no layer reads its output" for group in left for name in group.producers}


def _replace_relu6(model: nn.Module) -> tuple[str, ...]:
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.ReLU6]
    for name, module in found:
        model.set_submodule(name, nn.ReLU(module.inplace).train(module.training))
    return tuple(name for name, _ in found)


def _measure(
    model: nn.Module, example_inputs: Any, groups: Sequence[ScalingGroup]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of the model, and by layer the largest magnitude of each channel of its input, shape (channels,)."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[name] = inputs[0].abs().transpose(0, 1).flatten(1).amax(1).double()

        return hook

    with ExitStack() as stack:
        for name in dict.fromkeys(name for group in groups for name in group.consumers):
            stack.callback(model.get_submodule(name).register_forward_pre_hook(note(name)).remove)
        result = run_once(model, *call_arguments(example_inputs))
    largest = dict(zip(found, all_reduce_max(*found.values()), strict=True))
    outputs = [t.detach().clone() for t in tensors_in(result) if t.is_floating_point()]
    return outputs, {name: amax for name, amax in largest.items() if amax is not None}


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().amax() <= 1e-3 * b.abs().amax().clamp_min(1e-6)) if b.numel() else True


@torch.no_grad()
def _scale(layers: dict[str, nn.Module], groups: Sequence[ScalingGroup], activations: dict[str, Tensor]) -> None:
    """Sweep over the groups until no scale moves; weights in float64 until the end."""
    weights = {name: layer.weight.detach().double() for name, layer in layers.items()}  # type: ignore[operator]
    totals = [torch.ones_like(activations[group.consumers[0]]) for group in groups]
    floors = []
    for group in groups:
        largest = torch.stack([activations[name] for name in group.consumers]).amax(0)
        floors.append(largest / largest.amax().clamp_min(1e-30))
    for _ in range(SWEEPS):
        moved = 0.0
        for number, group in enumerate(groups):
            scale = torch.maximum(_group_scale(group, layers, weights), floors[number] / totals[number])
            for name in group.producers:
                weights[name] = multiply_channels(layers[name], "output", weights[name], 1 / scale)
            for name in group.consumers:
                weights[name] = multiply_channels(layers[name], "input", weights[name], scale)
            totals[number] *= scale
            moved = max(moved, scale.log().abs().amax().item())
        if moved < TOLERANCE:
            break
    for group, total in zip(groups, totals, strict=True):
        for name in group.producers:
            bias: Any = layers[name].bias
            if bias is not None:
                bias.copy_(bias.double() / total)
    for name, layer in layers.items():
        layer.weight.copy_(weights[name])  # type: ignore[operator]


def _group_scale(group: ScalingGroup, layers: dict[str, nn.Module], weights: dict[str, Tensor]) -> Tensor:
    """sqrt(p1 / p2), 1 for a channel that one side does not use."""

    def part(side: Side, names: Sequence[str]) -> Tensor:
        """Largest part that each channel takes of the range of one of the layers."""
        ranges = [channel_range(layers[name], side, weights[name]) for name in names]
        return torch.stack([r / r.amax().clamp_min(1e-30) for r in ranges]).amax(0)

    written, read = part("output", group.producers), part("input", group.consumers)
    return torch.where((written > 0) & (read > 0), (written / read).sqrt(), 1.0)
