"""Folding BatchNorm into the layer in front of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qat.descriptor import MIN_SCALE
from qat.placement.graph import Node
from qat.placement.tracing import trace
from qat.quantizer import TensorQuantizer


def fold_batch_norm_(model: nn.Module, example_inputs: Any) -> tuple[str, ...]:
    """Fold each BatchNorm into the convolution or linear layer that alone feeds it, in place, for inference-style QAT.

    In evaluation mode the model computes what it did, up to float rounding. The running statistics become part of
    weight and bias, and the BatchNorm becomes an nn.Identity, so training goes on without statistics. Unfolded is the
    default, and exports as well: TensorRT folds by itself. Folding before `prepare` or before calibration is the
    plain way; after calibration the weights' amax are scaled along, so that their codes stay.

    Args:
        model: float or prepared; changed in place.
        example_inputs: as for `prepare`.

    Returns:
        Names of the layers that took up a BatchNorm.
    """
    graph = trace(model, example_inputs)
    calls: dict[nn.Module, int] = {}
    for node in graph.nodes:
        calls[node.module] = calls.get(node.module, 0) + 1
    names = {module: name for name, module in model.named_modules()}
    parents = {child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    folded = []
    for node in graph.nodes:
        layer = layer_in_front(node)
        if layer is None or calls[layer] != 1 or calls[node.module] != 1:
            continue
        _fold(layer, node.module)
        parent, name = parents[node.module]
        setattr(parent, name, nn.Identity().train(node.module.training))
        folded.append(names[layer])
    return tuple(folded)


def layer_in_front(node: Node) -> Any:
    """The layer whose output only this BatchNorm reads, if it can be folded there."""
    norm = node.module
    if node.functional or node.op != "batch_norm" or norm.running_mean is None:
        return None
    made_by = node.inputs[0].producer
    if made_by is None or made_by.functional or len(made_by.outputs[0].readers) != 1:
        return None
    foldable = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
    return made_by.module if isinstance(made_by.module, foldable) else None


@torch.no_grad()
def _fold(layer: Any, norm: Any) -> None:
    variance = norm.running_var.double() + norm.eps
    gamma = torch.ones_like(variance) if norm.weight is None else norm.weight.double()
    beta = torch.zeros_like(variance) if norm.bias is None else norm.bias.double()
    factor = gamma / variance.sqrt()
    weight, bias = layer.weight, layer.bias
    shift = beta - norm.running_mean.double() * factor
    if bias is not None:
        shift += bias.double() * factor
    weight.copy_(weight.double() * _along_outputs(layer, factor))
    if bias is None:
        layer.bias = nn.Parameter(shift.to(weight.dtype))
    else:
        bias.copy_(shift)
    quantizer = getattr(layer, "_weight_quantizer", None)
    if isinstance(quantizer, TensorQuantizer) and quantizer.amax is not None and not quantizer.fixed:
        _scale_amax(quantizer, weight, factor)


def _along_outputs(layer: nn.Module, factor: Tensor) -> Tensor:
    """The factor of each output channel, in a shape that multiplies the weight."""
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        per_group = factor.reshape(layer.groups, -1)
        rows = per_group.repeat_interleave(layer.in_channels // layer.groups, 0)
        return rows.reshape(*rows.shape, *[1] * (layer.weight.dim() - 2))
    return factor.reshape(-1, *[1] * (layer.weight.dim() - 1))  # type: ignore[operator]


def _scale_amax(quantizer: TensorQuantizer, weight: Tensor, factor: Tensor) -> None:
    """Follow the weight: by the channel's factor where there is one scale each, else by the new maximum."""
    assert quantizer.amax is not None
    floor = quantizer.descriptor.max_bound * MIN_SCALE
    if quantizer.amax.numel() == factor.numel():
        quantizer.amax = (quantizer.amax.double() * factor.abs()).clamp_min(floor)
    else:
        quantizer.amax = weight.abs().amax().clamp_min(floor)
