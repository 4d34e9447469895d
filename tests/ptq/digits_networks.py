"""Real handwritten digits (scikit-learn, 8x8 pixels), small networks on them, and how to make them hard to quantize."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor, nn

import qat
from qat.descriptor import QuantDescriptor
from qat.quantizer import name_quantizers


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training (1,437), images and labels for validation (360); images (N, 1, 8, 8)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    split = train_test_split(found.images, found.target, test_size=0.2, stratify=found.target, random_state=0)
    x, x_val, y, y_val = (torch.from_numpy(part) for part in split)
    return (x[:, None] / 8 - 1).float(), y, (x_val[:, None] / 8 - 1).float(), y_val


def batches(count: int = 8, size: int = 64) -> list[Tensor]:
    return list(digits()[0][: count * size].split(size))


def accuracy(model: nn.Module) -> float:
    """Percent of the 360 validation images."""
    _, _, x, y = digits()
    model.eval()
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


class Block(nn.Module):
    """Depthwise and pointwise convolution with BatchNorm, and an identity where channels allow."""

    def __init__(self, inputs: int, outputs: int, norm: bool) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=not norm)
        self.bn1 = nn.BatchNorm2d(inputs) if norm else nn.Identity()
        self.relu1 = nn.ReLU()
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=not norm)
        self.bn2 = nn.BatchNorm2d(outputs) if norm else nn.Identity()
        self.relu2 = nn.ReLU(inplace=True)
        self.residual = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.depthwise(x)))
        y = self.bn2(self.pointwise(y))
        return self.relu2(y + x if self.residual else y)


class Separable(nn.Module):
    """Depthwise-separable classifier of 8x8 images."""

    def __init__(self, norm: bool = True, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=not norm)
        self.bn = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.blocks = nn.Sequential(Block(width, width, norm), Block(width, 2 * width, norm))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.hidden = nn.Conv2d(2 * width, 32, 2)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.bn(self.stem(x))))
        return self.fc(torch.relu(self.hidden(self.pool(x))).flatten(1))


@cache
def _trained() -> nn.Module:
    torch.manual_seed(0)
    model = Separable()
    x, y, _, _ = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    epochs = 8
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 22)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(64)[:22]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def trained() -> Separable:
    """A copy of a Separable trained for seconds, in eval mode."""
    model = copy.deepcopy(_trained())
    assert isinstance(model, Separable)
    return model


@torch.no_grad()
def unbalance(model: Separable, octaves: float = 6.0) -> Separable:
    """Spread channel ranges over many octaves without changing what the model computes.

    relu(s x) = s relu(x): each channel between the depthwise and the pointwise convolution of a block, and in front of
    the classifier, is multiplied by 2**u with random u and divided by it again behind.
    """
    generator = torch.Generator().manual_seed(1)

    def factors(count: int) -> Tensor:
        return 2.0 ** ((torch.rand(count, generator=generator) - 0.5) * octaves)

    for block in model.blocks:
        factor = factors(block.pointwise.in_channels)
        block.bn1.weight.mul_(factor)
        block.bn1.bias.mul_(factor)
        block.pointwise.weight.div_(factor[:, None, None])
    factor = factors(32)
    model.hidden.weight.mul_(factor[:, None, None, None])
    model.hidden.bias.mul_(factor)
    model.fc.weight.div_(factor)
    return model


def quantized(model: nn.Module, bits: int = 8, per_channel: bool = True, method: str = "max") -> nn.Module:
    """Every convolution and linear layer quantized, calibrated on the training images; weights of `bits`."""
    weight = QuantDescriptor(num_bits=bits, axis=0 if per_channel else None, narrow_range=True)
    qat.quantize_(model, weight_desc=weight)
    qat.calibrate(model, batches(), method=method, progress=False)
    name_quantizers(model)
    return model
