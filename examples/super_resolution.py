"""A super-resolution network: residual blocks with residual scaling, upsampling by PixelShuffle.

After Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution" (2017: EDSR, no BatchNorm,
residuals scaled by 0.1, mean subtracted) and Shi et al., "Real-Time Single Image and Video Super-Resolution Using an
Efficient Sub-Pixel Convolutional Neural Network" (2016). Trained on drawn images: `python super_resolution.py`.
"""
# ruff: noqa: D101, D102, D103

from __future__ import annotations

import torch
import torch.nn.functional as F
from fitting import fit
from torch import Tensor, nn

SCORE = "PSNR, dB"
FACTOR = 2


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(True), nn.Conv2d(channels, channels, 3, padding=1)
        )
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mul(self.scale) + x


class Network(nn.Module):
    """Image (N, 3, H, W) in 0..1 to an image (N, 3, 2 H, 2 W)."""

    def __init__(self, channels: int = 32, blocks: int = 6, scale: float = 0.1) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.449, 0.438, 0.404]).view(1, 3, 1, 1))
        self.head = nn.Conv2d(3, channels, 3, padding=1)
        self.body = nn.Sequential(
            *(ResidualBlock(channels, scale) for _ in range(blocks)), nn.Conv2d(channels, channels, 3, padding=1)
        )
        self.upsample = nn.Sequential(nn.Conv2d(channels, channels * FACTOR**2, 3, padding=1), nn.PixelShuffle(FACTOR))
        self.tail = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x - self.mean)
        x = x + self.body(x)
        return self.tail(self.upsample(x)) + self.mean


def make_batch(size: int, seed: int, pixels: int = 32) -> tuple[Tensor, Tensor]:
    """Small images (N, 3, p, p) and the images (N, 3, 2 p, 2 p) that they were scaled down from.

    Stripes, and discs with sharp edges.
    """
    g = torch.Generator().manual_seed(seed)
    large = pixels * FACTOR
    grid = torch.linspace(-1, 1, large)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    angle, rate, phase = (torch.rand(size, 1, 1, generator=g) for _ in range(3))
    angle, rate = angle * torch.pi, 4 + 14 * rate
    wave = torch.sin(rate * (x * angle.cos() + y * angle.sin()) + 6.3 * phase).unsqueeze(1)
    first, second = torch.rand(2, size, 3, 1, 1, generator=g)
    image = first + (second - first) * (wave + 1) / 2
    for _ in range(4):
        cx, cy, radius = (torch.rand(size, 1, 1, generator=g) for _ in range(3))
        inside = (x - 2 * cx + 1) ** 2 + (y - 2 * cy + 1) ** 2 < (0.1 + 0.4 * radius) ** 2
        image = torch.where(inside.unsqueeze(1), torch.rand(size, 3, 1, 1, generator=g), image)
    return F.interpolate(image, scale_factor=1 / FACTOR, mode="bicubic", antialias=True), image


def train(model: nn.Module, steps: int = 300, lr: float = 4e-3) -> None:
    def loss_of(seed: int) -> Tensor:
        small, large = make_batch(16, seed, pixels=24)
        return F.l1_loss(model(small), large)

    fit(model, torch.optim.Adam(model.parameters(), lr), loss_of, steps)


@torch.no_grad()
def score(model: nn.Module, seed: int = 0, size: int = 32) -> float:
    small, large = make_batch(size, seed)
    return float(-10 * torch.log10(F.mse_loss(model(small).clamp(0, 1), large)))


if __name__ == "__main__":
    torch.manual_seed(0)
    network = Network()
    train(network)
    small, large = make_batch(32, 0)
    bicubic = F.interpolate(small, scale_factor=2, mode="bicubic")
    print(f"{SCORE}: {score(network):.2f}; bicubic {-10 * torch.log10(F.mse_loss(bicubic, large)):.2f}")
