"""A YOLO-style object detector: CSP backbone, SPPF, path-aggregation neck, three anchor heads.

After Redmon and Farhadi, "YOLOv3" (2018: anchors, three scales), Wang et al., "CSPNet" (2019: half of the channels
passes a block by), He et al., "Spatial Pyramid Pooling" (2014) and Liu et al., "Path Aggregation Network" (2018).
Trained on drawn shapes: `python yolo_detector.py`.
"""
# ruff: noqa: D102, D103

from __future__ import annotations

import torch
from fitting import fit
from torch import Tensor, nn
from yolo_shapes import ANCHORS, CLASSES, SCORE, STRIDES, detection_loss, make_batch, recall

__all__ = ["SCORE", "Network", "make_batch", "score", "train"]


class ConvUnit(nn.Module):
    """Convolution, BatchNorm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.reduce, self.expand = ConvUnit(channels, channels), ConvUnit(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(self.reduce(x))
        return x + y if self.shortcut else y


class C3(nn.Module):
    """Cross-stage partial block: one half goes through the bottlenecks, the other goes around."""

    def __init__(self, inputs: int, outputs: int, depth: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.through, self.around = ConvUnit(inputs, half), ConvUnit(inputs, half)
        self.blocks = nn.Sequential(*(Bottleneck(half, shortcut) for _ in range(depth)))
        self.fuse = ConvUnit(2 * half, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fuse(torch.cat((self.blocks(self.through(x)), self.around(x)), dim=1))


class SPPF(nn.Module):
    """Spatial pyramid pooling by one pool applied three times."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.fuse = ConvUnit(channels, channels // 2), ConvUnit(2 * channels, channels)
        self.pool = nn.MaxPool2d(5, stride=1, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.reduce(x)]
        for _ in range(3):
            maps.append(self.pool(maps[-1]))
        return self.fuse(torch.cat(maps, 1))


class Detect(nn.Module):
    """Heads: raw maps (N, anchors, H, W, 5 + classes) in training, boxes (N, B, 5 + classes) in pixels otherwise."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.width = 5 + len(CLASSES)
        self.heads = nn.ModuleList(nn.Conv2d(c, 3 * self.width, 1) for c in channels)
        self.register_buffer("anchors", ANCHORS.float(), persistent=False)
        for head in self.heads:
            nn.init.constant_(head.bias, -3.0)  # few cells hold an object

    def forward(self, maps: list[Tensor]) -> list[Tensor] | Tensor:
        raw, boxes = [], []
        for i, head in enumerate(self.heads):
            y = head(maps[i])
            n, _, h, w = y.shape
            y = y.view(n, 3, self.width, h, w).permute(0, 1, 3, 4, 2).contiguous()
            raw.append(y)
            rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            grid = torch.stack((columns, rows), -1).to(y)
            y = y.sigmoid()
            xy = (y[..., 0:2] * 2 - 0.5 + grid) * STRIDES[i]
            wh = (y[..., 2:4] * 2) ** 2 * self.anchors[i].view(3, 1, 1, 2)
            boxes.append(torch.cat((xy, wh, y[..., 4:]), -1).view(n, -1, self.width))
        return raw if self.training else torch.cat(boxes, 1)


class Network(nn.Module):
    """Image (N, 3, H, W), H and W divisible by 32, to what `Detect` gives."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 96, 128)) -> None:
        super().__init__()
        a, b, c, d, e = widths
        self.stem = nn.Sequential(ConvUnit(3, a, 5, 2), ConvUnit(a, b, 3, 2), C3(b, b))
        self.stage3 = nn.Sequential(ConvUnit(b, c, 3, 2), C3(c, c, 2))
        self.stage4 = nn.Sequential(ConvUnit(c, d, 3, 2), C3(d, d, 2))
        self.stage5 = nn.Sequential(ConvUnit(d, e, 3, 2), C3(e, e), SPPF(e))
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.lateral5, self.lateral4 = ConvUnit(e, d), ConvUnit(d, c)
        self.top4, self.top3 = C3(2 * d, d, shortcut=False), C3(2 * c, c, shortcut=False)
        self.down3, self.down4 = ConvUnit(c, c, 3, 2), ConvUnit(d, d, 3, 2)
        self.bottom4, self.bottom5 = C3(2 * c, d, shortcut=False), C3(2 * d, e, shortcut=False)
        self.detect = Detect((c, d, e))

    def forward(self, x: Tensor) -> list[Tensor] | Tensor:
        p3 = self.stage3(self.stem(x))
        p4 = self.stage4(p3)
        n5 = self.lateral5(self.stage5(p4))
        n4 = self.lateral4(self.top4(torch.cat((self.upsample(n5), p4), 1)))
        out3 = self.top3(torch.cat((self.upsample(n4), p3), 1))
        out4 = self.bottom4(torch.cat((self.down3(out3), n4), 1))
        out5 = self.bottom5(torch.cat((self.down4(out4), n5), 1))
        return self.detect([out3, out4, out5])


def train(model: nn.Module, steps: int = 350, lr: float = 3e-3) -> None:
    def loss_of(seed: int) -> Tensor:
        images, boxes, classes = make_batch(16, seed)
        return detection_loss(model(images), boxes, classes)

    fit(model, torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4), loss_of, steps)


@torch.no_grad()
def score(model: nn.Module, seed: int = 0, size: int = 64) -> float:
    images, boxes, classes = make_batch(size, seed)
    return recall(model(images), boxes, classes)


if __name__ == "__main__":
    torch.manual_seed(0)
    network = Network()
    train(network)
    print(f"{SCORE}: {score(network):.1f}")
