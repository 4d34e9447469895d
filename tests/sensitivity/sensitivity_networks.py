"""Small calibrated networks with layers of known sensitivity."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import qat

NAMES = ("a", "ab", "a[0]", "a*", "b?")
"""Prefixes of one another, and characters that a glob reads as something else."""


class Chain(nn.Module):
    """Linear layers in a row, under awkward names."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            x = x + torch.tanh(self.get_submodule(name)(x))
        return x


def batches(count: int = 2, width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, width, generator=generator) for _ in range(count)]


def calibrated_chain(**factors: float) -> nn.Module:
    """A calibrated Chain; `ab=30` widens the amax of that layer's input by 30, which ruins its resolution."""
    torch.manual_seed(0)
    model = Chain()
    qat.quantize_(model)
    qat.calibrate(model, batches(), progress=False)
    for name, factor in factors.items():
        quantizer: Any = model.get_submodule(name)._modules["_input_quantizer"]
        quantizer.amax = quantizer.amax * factor
    return model


def float_layers(model: nn.Module) -> set[str]:
    """Layers all of whose quantizers pass through."""
    found: dict[str, bool] = {}
    for name, quantizer in qat.named_quantizers(model):
        layer = name.rpartition(".")[0]
        found[layer] = found.get(layer, True) and quantizer.state is qat.QuantizerState.PASSTHROUGH
    return {layer for layer, passes in found.items() if passes}


class Everything:
    """All that must be as it was: state dict bits, training flags, states, reasons."""

    def __init__(self, model: nn.Module) -> None:
        self.state = copy.deepcopy(model.state_dict())
        self.flags = {name: module.training for name, module in model.named_modules()}
        self.states = {n: (q.state, q.reason, q.amax_mode) for n, q in qat.named_quantizers(model)}
        self.hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    def check(self, model: nn.Module) -> None:
        now = Everything(model)
        assert list(now.state) == list(self.state)
        for name, value in self.state.items():
            other = now.state[name]
            assert other.dtype == value.dtype
            assert torch.equal(other.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
        assert (now.flags, now.states, now.hooks) == (self.flags, self.states, self.hooks)
