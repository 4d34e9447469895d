"""Watching quantizers while a model trains: weights that oscillate, values that are clipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qat.debug.codes import is_clipped, is_parameter, unclamped_codes
from qat.quantizer import QuantizerState, TensorQuantizer, named_quantizers

MOMENTUM = 0.01
OSCILLATING = 0.005
"""A weight whose frequency of oscillation, per optimizer step, is above this counts as oscillating."""


class Oscillation:
    """How often the integer codes of one weight turn back (Nagel et al. 2022, "Overcoming Oscillations in QAT", 4.1).

    A step oscillates where the code changes in the opposite direction of its last change; its frequency is an
    exponential moving average over the optimizer steps. Holds 6 bytes a value, on the weight's device.

    Args:
        codes: at the start, any shape, -128 to 127.
        momentum: of the moving average.
    """

    def __init__(self, codes: Tensor, momentum: float = MOMENTUM) -> None:
        self.momentum = momentum
        self._codes = codes.to(torch.int8)
        self._direction = torch.zeros_like(codes, dtype=torch.int8)
        self.frequency = torch.zeros_like(codes, dtype=torch.float32)

    @torch.no_grad()
    def update(self, codes: Tensor) -> None:
        """Take the codes after an optimizer step."""
        current = codes.to(torch.int8)
        direction = (current > self._codes).to(torch.int8) - (current < self._codes).to(torch.int8)
        turned = direction * self._direction < 0
        self.frequency.lerp_(turned.float(), self.momentum)
        self._direction = torch.where(direction != 0, direction, self._direction)
        self._codes = current

    def share(self, threshold: float = OSCILLATING) -> Tensor:
        """Share of the values whose frequency is above the threshold, scalar on their device."""
        return (self.frequency > threshold).float().mean()


class Monitor:
    """Oscillation and clipping of every quantizer of a model in training.

    Weights are looked at after each optimizer step, activations in the forward passes between `watch(True)` and
    `watch(False)`. Nothing waits for the device until `scalars`. The history starts anew when a run is resumed.

    Args:
        model: calibrated; its quantizers get forward hooks until `close`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {q: n for n, q in named_quantizers(model) if q.state is QuantizerState.QUANTIZING}
        self._weights: dict[TensorQuantizer, tuple[Tensor, Oscillation]] = {}
        self._outside: dict[str, Tensor] = {}
        self._seen: dict[str, int] = {}
        self._watching = False
        self._handles = [quantizer.register_forward_pre_hook(self._look) for quantizer in self._names]

    def watch(self, on: bool) -> None:
        """Count clipped activations in forward passes from now on, or no longer."""
        self._watching = on

    @torch.no_grad()
    def _look(self, quantizer: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        if not quantizer.training:
            return
        if is_parameter(x):
            if quantizer not in self._weights:
                shared = x.detach()  # the same memory, so it follows the optimizer
                self._weights[quantizer] = (shared, Oscillation(self._codes(quantizer, shared)))
        elif self._watching:
            outside = is_clipped(quantizer, unclamped_codes(quantizer, x)).sum()
            name = self._names[quantizer]
            self._outside[name] = self._outside.get(name, 0) + outside
            self._seen[name] = self._seen.get(name, 0) + x.numel()

    def step(self) -> None:
        """Call after each optimizer step."""
        for quantizer, (weight, oscillation) in self._weights.items():
            oscillation.update(self._codes(quantizer, weight))

    @staticmethod
    def _codes(quantizer: TensorQuantizer, weight: Tensor) -> Tensor:
        d = quantizer.descriptor
        return unclamped_codes(quantizer, weight).clamp_(d.min_bound, d.max_bound)

    def scalars(self) -> dict[str, float]:
        """Shares in percent by TensorBoard tag; the counts of activations start anew.

        `oscillating/<quantizer>` and `oscillating_weights`, of all weights together; `clipped/<quantizer>`.
        """
        values: dict[str, Tensor] = {}
        turning, total = torch.zeros(()), 0
        for quantizer, (weight, oscillation) in self._weights.items():
            name = self._names[quantizer]
            values[f"oscillating/{name}"] = share = oscillation.share()
            values[f"clipped/{name}"] = is_clipped(quantizer, unclamped_codes(quantizer, weight)).float().mean()
            turning = turning.to(share.device) + share * weight.numel()
            total += weight.numel()
        if total:
            values["oscillating_weights"] = turning / total
        for name, outside in self._outside.items():
            values[f"clipped/{name}"] = outside / self._seen[name]
        self._outside, self._seen = {}, {}
        if not values:
            return {}
        numbers = torch.stack([value.float() for value in values.values()]).tolist()
        return {tag: 100 * number for tag, number in zip(values, numbers, strict=True)}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
