"""Optimizers whose parameter groups know which parameters take weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qat.errors import ConfigError
from qat.quantizer import TensorQuantizer

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def parameter_groups(model: nn.Module, weight_decay: float, amax_lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """Trainable parameters in up to three groups, each once: "decay", "no_decay" and "amax".

    Biases and the parameters of norms take no weight decay, nor does any parameter with fewer than two dimensions
    (layer scales, PReLU slopes). amax takes none either: decay would pull every scale to zero.

    Args:
        model: its parameters with requires_grad are used.
        weight_decay: decay of the first group.
        amax_lr_factor: `lr_factor` of the amax group; 1 in the others.

    Returns:
        Groups for a torch optimizer, with the extra keys `name` and `lr_factor`; empty ones are left out.
    """
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    amax: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, TensorQuantizer):
                amax.append(parameter)
            elif isinstance(module, _NORMS) or "bias" in name or parameter.dim() < 2:
                no_decay.append(parameter)
            else:
                decay.append(parameter)
    groups = [
        {"name": "decay", "params": decay, "weight_decay": weight_decay, "lr_factor": 1.0},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0, "lr_factor": 1.0},
        {"name": "amax", "params": amax, "weight_decay": 0.0, "lr_factor": amax_lr_factor},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    name: str = "sgd",
    lr: float = 0.01,
    weight_decay: float = 1e-4,
    momentum: float = 0.9,
    amax_lr_factor: float = 1.0,
) -> torch.optim.Optimizer:
    """SGD or AdamW (Loshchilov and Hutter 2019) over `parameter_groups`, with fused kernels on a GPU.

    Set the amax mode and move the model to its device before calling this.

    Args:
        model: model to train.
        name: "sgd" or "adamw".
        lr: base learning rate; `set_learning_rate` changes it per step.
        weight_decay: decay of weights only.
        momentum: momentum of SGD, without dampening; AdamW ignores it.
        amax_lr_factor: learning rate of learned amax as a multiple of lr.

    Raises:
        ConfigError: the name is unknown, or the model has no trainable parameter.
    """
    groups = parameter_groups(model, weight_decay, amax_lr_factor)
    if not groups:
        raise ConfigError("the model has no trainable parameter. Set requires_grad on those to train.")
    on_gpu = all(p.is_cuda for group in groups for p in group["params"])
    fused = True if on_gpu else None
    if name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=fused)
    elif name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=lr, fused=fused)
    else:
        raise ConfigError(f"optimizer={name!r} is unknown. Use 'sgd' or 'adamw'.")
    set_learning_rate(optimizer, lr)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group `lr` times its `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
