"""What an optimizer step does to amax: learned ones stay positive, re-estimated ones follow the step's tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from qat.descriptor import MIN_SCALE
from qat.distributed import world_size
from qat.quantizer import AmaxMode, TensorQuantizer


class PositiveAmax:
    """Keeps learned amax positive: an optimizer step can carry it past zero, and no checkpoint may hold such a scale.

    A negative value is replaced by its magnitude, which is what the quantizer's forward uses, and a tiny one by the
    smallest amax that exports.
    """

    def __init__(self, quantizers: list[TensorQuantizer]) -> None:
        learned = [q for q in quantizers if isinstance(q._amax, nn.Parameter)]
        self.parameters = [q._amax for q in learned]
        self.floors = [q.descriptor.max_bound * MIN_SCALE for q in learned]

    @torch.no_grad()
    def apply(self) -> None:
        """Call after each optimizer step."""
        if self.parameters:
            torch._foreach_abs_(self.parameters)
            torch._foreach_clamp_min_(self.parameters, self.floors)


class MovingAmax:
    """Moves re-estimated amax of activations once an optimizer step, by the maximum over all its calls and ranks.

    So a quantizer that several layers share moves as often as any other, a group of accumulated batches counts as
    the one batch that it stands for, and ranks do what one process with the global batch does. Until `close` the
    quantizers only note their maxima.
    """

    def __init__(self, quantizers: list[TensorQuantizer]) -> None:
        followers = [q for q in quantizers if q.amax_mode is AmaxMode.REESTIMATED and not q.fixed]
        self.quantizers = [q for q in followers if q.descriptor.axis is None and not q.descriptor.narrow_range]
        self.momentum = torch.tensor([q.momentum for q in self.quantizers])
        for quantizer in self.quantizers:
            quantizer.step_max = torch.zeros_like(quantizer._amax)
            self.momentum = self.momentum.to(quantizer._amax.device)

    @torch.no_grad()
    def apply(self) -> None:
        """Call after each optimizer step."""
        if not self.quantizers:
            return
        noted = [q.step_max for q in self.quantizers if q.step_max is not None]
        largest = torch.stack(noted)
        if world_size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        amax = torch.stack([q._amax for q in self.quantizers])
        moved = torch.where(largest > 0, torch.lerp(amax, largest, self.momentum), amax)  # zero: nothing was seen
        torch._foreach_copy_([q._amax for q in self.quantizers], list(moved.unbind()))
        torch._foreach_zero_(noted)

    def close(self) -> None:
        """Let every call move amax again, as outside of a training loop."""
        for quantizer in self.quantizers:
            quantizer.step_max = None
