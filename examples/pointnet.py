"""PointNet: a point cloud is classified by a shared MLP, two learned alignments and a maximum over the points.

After Qi et al., "PointNet: Deep Learning on Point Sets for 3D Classification and Segmentation" (2017), at a quarter of
its widths. Trained on four bodies seen from any side: `python pointnet.py`.
"""
# ruff: noqa: D102, D103

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from fitting import fit
from torch import Tensor, nn

SCORE = "top-1, %"
CLASSES, POINTS = ("sphere", "cube", "cylinder", "cone", "torus"), 256


class SharedMLP(nn.Sequential):
    """Linear layers over the channels of every point, each with BatchNorm and ReLU."""

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class TNet(nn.Module):
    """Predicts a matrix (N, k, k) that aligns the points; the identity at the start."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.mlp = SharedMLP(k, 32, 64, 128)
        self.fc1, self.fc2, self.fc3 = nn.Linear(128, 64), nn.Linear(64, 32), nn.Linear(32, k * k)
        self.bn1, self.bn2 = nn.BatchNorm1d(64), nn.BatchNorm1d(32)
        nn.init.normal_(self.fc3.weight, std=1e-3)
        nn.init.zeros_(self.fc3.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max(self.mlp(x), 2)[0]
        x = F.relu(self.bn1(self.fc1(x)))
        x = F.relu(self.bn2(self.fc2(x)))
        identity = torch.eye(self.k, dtype=x.dtype, device=x.device).flatten()
        return (self.fc3(x) + identity).view(-1, self.k, self.k)


class Network(nn.Module):
    """Points (N, 3, P) to log-probabilities (N, classes) and the alignment of the features (N, 32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.input_transform, self.feature_transform = TNet(3), TNet(32)
        self.mlp1, self.mlp2 = SharedMLP(3, 32, 32), SharedMLP(32, 32, 64, 256)
        self.classifier = nn.Sequential(
            nn.Linear(256, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Linear(128, 64), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Linear(64, len(CLASSES)),
        )  # fmt: skip

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.bmm(points.transpose(2, 1), self.input_transform(points)).transpose(2, 1)
        x = self.mlp1(x)
        alignment = self.feature_transform(x)
        x = torch.bmm(x.transpose(2, 1), alignment).transpose(2, 1)
        x = self.mlp2(x).max(dim=2, keepdim=True)[0].flatten(1)
        return F.log_softmax(self.classifier(x), dim=1), alignment


def make_batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (N, 3, 256) on the surface of a body that is turned about the vertical and stretched, and its class."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (size,), generator=g)
    u, v, face = torch.rand(3, size, POINTS, generator=g)
    angle, side = 2 * torch.pi * u, 2 * v - 1
    ring = 1 - side.square()
    sphere = torch.stack((ring.sqrt() * angle.cos(), ring.sqrt() * angle.sin(), side), 1)
    cube = F.normalize(torch.randn(size, 3, POINTS, generator=g), dim=1)
    cube = cube / cube.abs().amax(1, keepdim=True) * 0.8
    cylinder = torch.stack((0.7 * angle.cos(), 0.7 * angle.sin(), side), 1)
    cone = torch.stack((v * angle.cos(), v * angle.sin(), 1 - 2 * v), 1)
    tube = 0.7 + 0.3 * torch.cos(2 * torch.pi * face)
    torus = torch.stack((tube * angle.cos(), tube * angle.sin(), 0.3 * torch.sin(2 * torch.pi * face)), 1)
    points = torch.stack((sphere, cube, cylinder, cone, torus), 1)[torch.arange(size), labels]
    turn = 2 * torch.pi * torch.rand(size, generator=g)
    c, s, zero, one = turn.cos(), turn.sin(), torch.zeros(size), torch.ones(size)
    rotation = torch.stack((c, -s, zero, s, c, zero, zero, zero, one), 1).view(size, 3, 3)
    stretched = points * (0.8 + 0.4 * torch.rand(size, 3, 1, generator=g))
    return rotation @ stretched + 0.03 * torch.randn(size, 3, POINTS, generator=g), labels


def loss_fn(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    log_probabilities, alignment = output
    error = alignment @ alignment.transpose(1, 2) - torch.eye(alignment.shape[1])
    return F.nll_loss(log_probabilities, labels) + 1e-3 * error.square().sum((1, 2)).mean()


def train(model: nn.Module, steps: int = 150, lr: float = 3e-3) -> None:
    def loss_of(seed: int) -> Tensor:
        points, labels = make_batch(32, seed)
        return loss_fn(model(points), labels)

    fit(model, torch.optim.Adam(model.parameters(), lr), loss_of, steps)


@torch.no_grad()
def score(model: nn.Module, seed: int = 0, size: int = 256) -> float:
    points, labels = make_batch(size, seed)
    return 100 * float((model(points)[0].argmax(1) == labels).float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    network = Network()
    train(network)
    print(f"{SCORE}: {score(network):.1f}")
