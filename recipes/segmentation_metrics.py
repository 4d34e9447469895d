"""Dice and IoU of each class over all pixels of a data set, through torchmetrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qat.errors import ConfigError
from recipes.segmentation_losses import IGNORED
from recipes.segmentation_models import INSTALL


def to_classes(logits: Tensor) -> Tensor:
    """Class numbers, shape (N, H, W): the sign of one logit, or the largest of several."""
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


class SegmentationMetrics:
    """Collects predictions and truth; under torch.distributed those of all ranks count.

    Dice is the F1 score of the pixels, IoU the Jaccard index; both of the whole data set and not the mean over images,
    so that an image without a class does not decide.

    Args:
        class_names: in the order of the class numbers.
        device: where predictions lie.
        shared: add up over torch.distributed; False where one process evaluates alone.

    Raises:
        ConfigError: torchmetrics is not installed.
    """

    def __init__(self, class_names: Sequence[str], device: torch.device | str = "cpu", shared: bool = True) -> None:
        try:
            from torchmetrics.classification import MulticlassF1Score, MulticlassJaccardIndex
        except ImportError as error:
            raise ConfigError(f"Dice and IoU need torchmetrics. {INSTALL}") from error
        self.class_names = tuple(class_names)
        options: dict[str, Any] = {
            "num_classes": len(self.class_names),
            "average": "none",
            "ignore_index": IGNORED,
            "zero_division": float("nan"),
            "validate_args": False,
            "sync_on_compute": shared,
        }
        self.dice = MulticlassF1Score(**options).to(device)
        self.iou = MulticlassJaccardIndex(**options).to(device)

    def update(self, classes: Tensor, truth: Tensor) -> None:
        """Add class numbers of some images, both of shape (N, H, W)."""
        self.dice.update(classes, truth)
        self.iou.update(classes, truth)

    def compute(self) -> dict[str, float]:
        """Percent: "dice" and "miou" (means over the classes that occur), "dice_<class>" and "iou_<class>".

        A class that is neither there nor predicted has no metrics.
        """
        found = {}
        for name, mean, metric in (("dice", "dice", self.dice), ("iou", "miou", self.iou)):
            values = (100 * metric.compute().double()).tolist()
            known = {c: v for c, v in zip(self.class_names, values, strict=True) if math.isfinite(v)}
            found[mean] = sum(known.values()) / max(len(known), 1)
            found |= {f"{name}_{c}": value for c, value in known.items()}
        return found
