"""Dice loss with cross-entropy: of one logit for two classes, or of a logit for each class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.errors import ConfigError
from qat.training import supervised_loss
from qat.training.trainer import LossFn
from recipes.segmentation_config import LossConfig
from recipes.segmentation_models import INSTALL

IGNORED = 255
"""Class number of pixels that count for nothing."""


def segmentation_loss(config: LossConfig, label_smoothing: float = 0.0) -> LossFn:
    """The loss of a batch (images, class numbers (N, H, W)), computed in float32 whatever the logits' type.

    Dice is that of segmentation-models-pytorch: of all pixels of the batch, averaged over the classes (Milletari et
    al. 2016). Pixels of class 255 are left out.

    Raises:
        ConfigError: segmentation-models-pytorch is not installed, or label smoothing with "bce".
    """
    try:
        from segmentation_models_pytorch.losses import DiceLoss
    except ImportError as error:
        raise ConfigError(f"the Dice loss needs segmentation-models-pytorch. {INSTALL}") from error
    if config.kind == "bce" and label_smoothing:
        raise ConfigError(f'label_smoothing={label_smoothing} needs loss.kind="ce".')
    binary = config.kind == "bce"
    dice = DiceLoss(mode="binary" if binary else "multiclass", from_logits=True, ignore_index=IGNORED)
    weights = None if config.class_weights is None else torch.tensor(config.class_weights)

    def criterion(output: Tensor, classes: Tensor) -> Tensor:
        logits, counted = output.float(), classes != IGNORED
        if binary:
            pixels = F.binary_cross_entropy_with_logits(logits[:, 0], (classes == 1).float(), reduction="none")
            entropy = (pixels * counted).sum() / counted.sum().clamp(min=1)
        else:
            each = torch.ones(logits.shape[1]) if weights is None else weights
            each = each.to(logits.device)
            total = F.cross_entropy(
                logits, classes, each, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
            )
            # Not reduction="mean": without a pixel that counts it is NaN.
            entropy = total / (each[classes * counted] * counted).sum().clamp(min=1e-6)
        loss: Tensor = config.dice * dice(logits, classes) + (1 - config.dice) * entropy
        return loss

    return supervised_loss(criterion)
