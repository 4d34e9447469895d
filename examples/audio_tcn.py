"""Keyword spotting on the raw waveform: a strided front end, then a temporal convolutional network.

After Dai et al., "Very Deep Convolutional Neural Networks for Raw Waveforms" (2016: M5, a first kernel of 80 samples)
and Bai, Kolter and Koltun, "An Empirical Evaluation of Generic Convolutional and Recurrent Networks for Sequence
Modeling" (2018: residual blocks of dilated causal convolutions), with BatchNorm in the place of weight normalization.
Trained on synthetic chirps: `python audio_tcn.py`.
"""
# ruff: noqa: D101, D102, D103

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from fitting import fit
from torch import Tensor, nn

SCORE = "top-1, %"
CLASSES, SAMPLES, RATE = 8, 4000, 4000


class CausalConv(nn.Module):
    """Dilated convolution that sees only the past, BatchNorm, ReLU, dropout."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int, dropout: float) -> None:
        super().__init__()
        self.past = (kernel - 1) * dilation
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, bias=False)
        self.bn = nn.BatchNorm1d(outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.relu(self.bn(self.conv(F.pad(x, (self.past, 0))))))


class TemporalBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, dilation: int, kernel: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.conv1 = CausalConv(inputs, outputs, kernel, dilation, dropout)
        self.conv2 = CausalConv(outputs, outputs, kernel, dilation, dropout)
        self.downsample = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(self.conv1(x))
        res = x if self.downsample is None else self.downsample(x)
        return F.relu(out + res)


class Network(nn.Module):
    """Waveform (N, 1, 4000) to logits (N, 8)."""

    def __init__(self, channels: tuple[int, ...] = (32, 32, 48, 48, 64, 64)) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(1, channels[0], 80, stride=8, padding=36), nn.BatchNorm1d(channels[0]), nn.ReLU(), nn.MaxPool1d(4)
        )
        self.blocks = nn.Sequential(*(TemporalBlock(a, b, 2**i) for i, (a, b) in enumerate(pairwise(channels))))
        self.head = nn.Linear(channels[-1], CLASSES)

    def forward(self, waveform: Tensor) -> Tensor:
        y = self.blocks(self.front(waveform))
        return self.head(y[:, :, -1])


def make_batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """One second of noise with a word of three tones; a word is a pattern of rising and falling tones."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=g)
    time = torch.arange(SAMPLES) / RATE
    waveform = torch.zeros(size, SAMPLES)
    start = 0.3 * torch.rand(size, 1, generator=g)
    for part in range(3):
        rising = ((labels >> part) & 1).float().view(size, 1) * 2 - 1
        begin = start + 0.22 * part
        local = (time - begin).clamp(0, 0.2)
        base = 500 + 200 * torch.rand(size, 1, generator=g)
        window = torch.sin(torch.pi * local / 0.2)
        waveform += window * torch.sin(2 * torch.pi * (base * local + rising * 900 * local * (local - 0.2)))
    loudness = 0.3 + 0.7 * torch.rand(size, 1, generator=g)
    waveform = loudness * waveform + 0.2 * torch.randn(size, SAMPLES, generator=g)
    return waveform.unsqueeze(1), labels


def train(model: nn.Module, steps: int = 200, lr: float = 4e-3) -> None:
    def loss_of(seed: int) -> Tensor:
        waveform, labels = make_batch(64, seed)
        return F.cross_entropy(model(waveform), labels)

    fit(model, torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-3), loss_of, steps)


@torch.no_grad()
def score(model: nn.Module, seed: int = 0, size: int = 512) -> float:
    waveform, labels = make_batch(size, seed)
    return 100 * float((model(waveform).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    network = Network()
    train(network)
    print(f"{SCORE}: {score(network):.1f}")
