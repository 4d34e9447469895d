"""Networks built while quant_modules is initialized, here and in pytorch-quantization, with their inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Convolutions (one dead channel, one grouped), BatchNorm, pooling and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        with torch.no_grad():
            self.conv.weight[5] = 0
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        y: Tensor = self.fc(self.pool(torch.relu(self.grouped(x))).flatten(1))
        return y


def convnet() -> tuple[nn.Module, Tensor]:
    return ConvNet(), torch.randn(6, 3, 12, 12)


def other_convolutions() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv1d(3, 6, 3), nn.AvgPool1d(2), nn.Conv1d(6, 1, 1, padding=1)]
    return nn.Sequential(*layers), torch.randn(6, 3, 15)


def volume() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv3d(2, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool3d(1)), torch.randn(4, 2, 5, 6, 7)


def transposed() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2, stride=2)), torch.randn(4, 3, 7, 7)


def lstm() -> tuple[nn.Module, Tensor]:
    return nn.LSTM(5, 6, num_layers=2, bidirectional=True), torch.randn(4, 6, 5)


def lstm_cell() -> tuple[nn.Module, Tensor]:
    return nn.LSTMCell(5, 6), torch.randn(6, 5)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convnet": convnet,
    "other_convolutions": other_convolutions,
    "volume": volume,
    "transposed": transposed,
    "lstm": lstm,
    "lstm_cell": lstm_cell,
}
