"""Pictures of shapes with their boxes, and the loss and the score of the detector that finds them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import batched_nms, box_iou

SCORE = "objects found, %"
CLASSES = ("rectangle", "ellipse", "frame")
STRIDES = (8, 16, 32)
ANCHORS = torch.tensor([[[12, 12], [18, 10], [10, 18]], [[22, 22], [32, 18], [18, 32]], [[38, 38], [50, 28], [28, 50]]])
SIZE, OBJECTS = 96, 2


def make_batch(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, 3, 96, 96) in 0..1, boxes (N, 2, 4) as x, y, width, height in pixels, classes (N, 2)."""
    g = torch.Generator().manual_seed(seed)
    wh = torch.empty(size, OBJECTS, 2).uniform_(10, 44, generator=g)
    xy = wh / 2 + torch.rand(size, OBJECTS, 2, generator=g) * (SIZE - wh)
    classes = torch.randint(len(CLASSES), (size, OBJECTS), generator=g)
    colours = torch.rand(size, OBJECTS, 3, generator=g)
    pixel = torch.arange(SIZE) + 0.5
    images = torch.rand(size, 3, 1, 1, generator=g) + 0.1 * torch.randn(size, 3, SIZE, SIZE, generator=g)
    for k in range(OBJECTS):
        u = ((pixel - xy[:, k, 0:1]) / wh[:, k, 0:1] * 2).view(size, 1, SIZE)
        v = ((pixel - xy[:, k, 1:2]) / wh[:, k, 1:2] * 2).view(size, SIZE, 1)
        far, kind = torch.maximum(u.abs(), v.abs()), classes[:, k].view(size, 1, 1)
        inside = torch.where(kind == 1, u**2 + v**2 < 1, far < 1) & ~((kind == 2) & (far < 0.6))
        images = torch.where(inside.unsqueeze(1), colours[:, k].view(size, 3, 1, 1), images)
    return images.clamp(0, 1), torch.cat((xy, wh), -1), classes


def detection_loss(raw: list[Tensor], boxes: Tensor, classes: Tensor) -> Tensor:
    """Each object belongs to one cell of one anchor, the one whose shape fits best."""
    n = boxes.shape[0]
    shapes = ANCHORS.view(-1, 2).float()
    wh = boxes[..., None, 2:]
    common = torch.minimum(wh, shapes).prod(-1)
    best = (common / (wh.prod(-1) + shapes.prod(-1) - common)).argmax(-1)
    loss = torch.zeros(())
    for level, y in enumerate(raw):
        wanted = torch.zeros_like(y[..., 4])
        image, k = torch.where(best // 3 == level)
        if len(image):
            anchor, box = best[image, k] % 3, boxes[image, k]
            cell = (box[:, :2] / STRIDES[level]).long().clamp(max=y.shape[2] - 1)
            found = y[image, anchor, cell[:, 1], cell[:, 0]]
            wanted[image, anchor, cell[:, 1], cell[:, 0]] = 1.0
            xy = found[:, :2].sigmoid() * 2 - 0.5 + cell - box[:, :2] / STRIDES[level]
            ratio = (found[:, 2:4].sigmoid() * 2) ** 2 - box[:, 2:] / ANCHORS[level, anchor]
            labels = F.cross_entropy(found[:, 5:], classes[image, k], reduction="sum")
            loss = loss + (5 * (xy.abs().sum() + ratio.abs().sum()) + labels) / n
        loss = loss + 2 * F.binary_cross_entropy_with_logits(y[..., 4], wanted, reduction="sum") / n
    return loss


def recall(predicted: Tensor, boxes: Tensor, classes: Tensor) -> float:
    """Percent of the objects that one of the four best boxes of the image overlaps by half, with the right class."""
    hits = 0
    for y, box, label in zip(predicted, boxes, classes, strict=True):
        confidence, kind = (y[:, 4:5] * y[:, 5:]).max(-1)
        corners = torch.cat((y[:, :2] - y[:, 2:4] / 2, y[:, :2] + y[:, 2:4] / 2), -1)
        kept = batched_nms(corners, confidence, kind, 0.5)[:4]
        truth = torch.cat((box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2), -1)
        right = (box_iou(truth, corners[kept]) > 0.5) & (label[:, None] == kind[kept])
        hits += int(right.any(1).sum())
    return 100 * hits / classes.numel()
