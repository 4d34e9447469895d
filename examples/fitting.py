"""The training loop of the networks beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[int], Tensor], steps: int) -> None:
    """One cycle of learning rates up to the optimizer's own; `loss_of(seed)` draws a batch and gives its loss."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], steps)
    model.train()
    for step in range(steps):
        loss = loss_of(1000 + step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
