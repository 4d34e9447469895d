"""Learning for one layer which weights to round up and which to round down."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qat.errors import ConfigError, refuse_below_one
from qat.modes import passing_through
from qat.ptq.following import Function
from qat.ptq.running import average_over_ranks
from qat.quantizer import TensorQuantizer

STRETCH = (-0.1, 1.1)
"""The sigmoid is stretched to it and clipped, so that it reaches 0 and 1 (Nagel et al. 2020, equation 23)."""
BETA = (20.0, 2.0)


@dataclass(frozen=True)
class RoundingConfig:
    """How the rounding of a layer is learned.

    Attributes:
        steps: optimizer steps for each layer.
        batch_size: samples in a step, of each rank.
        samples: samples kept in memory for a layer, inputs and outputs, of each rank.
        lr: learning rate of Adam.
        regularization: weight of the term that drives each weight to one of its two neighbours; the
            reconstruction error counts relative to that of rounding to nearest.
        warm_up: share of the steps without that term.
        seed: seed of the order of the samples.

    Raises:
        ConfigError: a value outside its range; the message names the field.
    """

    steps: int = 1000
    batch_size: int = 32
    samples: int = 1024
    lr: float = 0.03
    regularization: float = 30.0
    warm_up: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below_one(self, "steps", "batch_size", "samples")
        if not self.lr > 0:
            raise ConfigError(f"lr={self.lr} is not positive. Use a number above 0.")
        if not self.regularization >= 0:
            raise ConfigError(f"regularization={self.regularization} is negative. Use 0 or more.")
        if not 0 <= self.warm_up < 1:
            raise ConfigError(f"warm_up={self.warm_up} is outside [0, 1). Use 0.2 for a fifth of the steps.")

    def beta(self, step: int) -> float | None:
        """Exponent of the regularization, falling from 20 to 2; None while there is none."""
        first = self.warm_up * self.steps
        if step < first:
            return None
        return BETA[0] + (BETA[1] - BETA[0]) * (step - first) / max(self.steps - first, 1)


@dataclass(frozen=True)
class Rounding:
    """Result for one layer: mean squared errors of its output, and the share of its weights not rounded to nearest."""

    error_nearest: float
    error_learned: float
    changed: float


@dataclass(frozen=True)
class LayerData:
    """What a layer gets in the quantized model and gives in the float one, behind `functions`; both (samples, ...)."""

    inputs: Tensor
    targets: Tensor


class _SoftWeight:
    """The weight of a layer with a variable between 0 and 1 for rounding down or up."""

    def __init__(self, layer: Any) -> None:
        quantizer: TensorQuantizer = layer._weight_quantizer
        d, scale = quantizer.descriptor, quantizer.scale
        assert scale is not None
        weight: Tensor = layer.weight.detach().float()
        shape = [-1 if d.axis is not None and dim == d.axis % weight.dim() else 1 for dim in range(weight.dim())]
        self.scale = scale.reshape(shape) if d.axis is not None else scale
        self.bounds = (d.min_bound, d.max_bound)
        ratio = weight / self.scale
        self.floor = ratio.floor()
        self.nearest = ratio.round().clamp(*self.bounds)
        part = (ratio - self.floor - STRETCH[0]) / (STRETCH[1] - STRETCH[0])
        # What is a whole code, such as a pruned weight's zero, is its own neighbour: it has no gradient and stays.
        self.logits = part.logit().masked_fill(ratio == self.floor, -math.inf).requires_grad_()

    def up(self) -> Tensor:
        """Between 0 (down) and 1 (up)."""
        low, high = STRETCH
        return (self.logits.sigmoid() * (high - low) + low).clamp(0, 1)

    def soft(self) -> Tensor:
        """The weight to learn with."""
        return (self.floor + self.up()).clamp(*self.bounds) * self.scale

    def codes(self) -> Tensor:
        """Integers after learning."""
        return (self.floor + (self.up() >= 0.5)).clamp(*self.bounds)


def learn_rounding(
    layer: nn.Module,
    data: LayerData,
    functions: Sequence[Function],
    config: RoundingConfig,
    generator: torch.Generator,
    advance: Callable[[], Any],
) -> Rounding:
    """Learn the rounding of a layer's weight and write it: each weight becomes the grid point it is rounded to.

    Where the learned rounding is no better than rounding to nearest on all samples, the weight stays as it was.
    """
    soft = _SoftWeight(layer)
    quantizer: Any = layer._weight_quantizer
    with passing_through([quantizer]):
        nearest = _error(layer, soft.nearest * soft.scale, data, functions, config.batch_size)
        if nearest == 0:
            return Rounding(0.0, 0.0, 0.0)
        _learn(layer, soft, data, functions, config, generator, nearest, advance)
        codes = soft.codes().detach()
        learned = _error(layer, codes * soft.scale, data, functions, config.batch_size)
    if not learned < nearest:
        return Rounding(nearest, nearest, 0.0)
    with torch.no_grad():
        layer.weight.copy_(codes * soft.scale)  # type: ignore[operator]
    return Rounding(nearest, learned, (codes != soft.nearest).double().mean().item())


def _learn(
    layer: nn.Module,
    soft: _SoftWeight,
    data: LayerData,
    functions: Sequence[Function],
    config: RoundingConfig,
    generator: torch.Generator,
    unit: float,
    advance: Callable[[], Any],
) -> None:
    optimizer = torch.optim.Adam([soft.logits], lr=config.lr)
    for step in range(config.steps):
        index = torch.randint(len(data.inputs), (config.batch_size,), generator=generator).to(data.inputs.device)
        with torch.enable_grad():
            outputs = _run(layer, soft.soft(), data.inputs[index], functions)
            loss = (outputs - data.targets[index]).square().mean() / unit
            beta = config.beta(step)
            if beta is not None:
                loss = loss + config.regularization * (1 - (2 * soft.up() - 1).abs() ** beta).mean()
            (soft.logits.grad,) = torch.autograd.grad(loss, soft.logits)
        average_over_ranks(soft.logits.grad)
        optimizer.step()
        advance()


def _run(layer: nn.Module, weight: Tensor, inputs: Tensor, functions: Sequence[Function]) -> Tensor:
    outputs: Tensor = functional_call(layer, {"weight": weight.to(layer.weight.dtype)}, (inputs,))  # type: ignore[arg-type]
    for function in functions:
        outputs = function(outputs)
    return outputs


@torch.no_grad()
def _error(layer: nn.Module, weight: Tensor, data: LayerData, functions: Sequence[Function], batch_size: int) -> float:
    """Mean squared error over all samples of all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start in range(0, len(data.inputs), batch_size):
        inputs, targets = (t[start : start + batch_size] for t in (data.inputs, data.targets))
        difference = _run(layer, weight, inputs, functions) - targets
        total += difference.double().square().mean() * (len(inputs) / len(data.inputs))
    average_over_ranks(total)
    return float(total)
