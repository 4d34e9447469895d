"""Dice, IoU and the losses against the formulas."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.errors import ConfigError
from recipes.segmentation_config import LossConfig

pytest.importorskip("torchmetrics", reason="needs torchmetrics: pip install 'qat[segmentation]'")
pytest.importorskip("segmentation_models_pytorch", reason="needs segmentation-models-pytorch: 'qat[segmentation]'")

from recipes.segmentation_losses import IGNORED, segmentation_loss
from recipes.segmentation_metrics import SegmentationMetrics, to_classes


class Given(nn.Module):
    """Returns its input: the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def loss(config: LossConfig, logits: Tensor, classes: Tensor, smoothing: float = 0.0) -> Tensor:
    return segmentation_loss(config, smoothing)(Given(), (logits, classes))


def test_dice_and_iou_are_those_of_all_pixels_together() -> None:
    generator = np.random.default_rng(0)
    truth, found = generator.integers(0, 3, (2, 4, 8, 8))
    truth[0, 0, :4] = IGNORED
    metrics = SegmentationMetrics(("a", "b", "c"))
    for batch in (slice(0, 1), slice(1, 4)):
        metrics.update(torch.from_numpy(found[batch]), torch.from_numpy(truth[batch]))
    computed, counted = metrics.compute(), truth != IGNORED
    dice, iou = [], []
    for number, name in enumerate("abc"):
        hit = ((found == number) & (truth == number)).sum()
        total = ((found == number) & counted).sum() + (truth == number).sum()
        dice.append(100 * 2 * hit / total)
        iou.append(100 * hit / (total - hit))
        assert computed[f"dice_{name}"] == pytest.approx(dice[-1], abs=1e-4)
        assert computed[f"iou_{name}"] == pytest.approx(iou[-1], abs=1e-4)
    assert computed["dice"] == pytest.approx(np.mean(dice), abs=1e-4)
    assert computed["miou"] == pytest.approx(np.mean(iou), abs=1e-4)


def test_a_class_that_does_not_occur_has_no_metrics() -> None:
    metrics = SegmentationMetrics(("a", "b", "c"))
    metrics.update(torch.tensor([[[0, 0, 2]]]), torch.tensor([[[0, 0, 0]]]))
    computed = metrics.compute()
    assert "dice_b" not in computed and computed["dice_c"] == 0
    assert computed["dice"] == pytest.approx((100 * 4 / 5 + 0) / 2)


def test_classes_of_one_logit_and_of_several() -> None:
    assert to_classes(torch.tensor([[[[-1.0, 0.5]]]])).tolist() == [[[0, 1]]]
    assert to_classes(torch.tensor([[[[1.0]], [[3.0]], [[2.0]]]])).tolist() == [[[1]]]


@pytest.mark.parametrize("kind", ["bce", "ce"])
def test_the_right_answer_costs_nothing_and_the_wrong_one_much(kind: str) -> None:
    classes = torch.randint(0, 2, (2, 8, 8))
    sign = 40.0 * (2 * classes[:, None] - 1)
    right = sign if kind == "bce" else torch.cat([-sign, sign], dim=1)
    assert loss(LossConfig(kind), right, classes) < 1e-4
    assert loss(LossConfig(kind), -right, classes) > 5


@pytest.mark.parametrize("kind", ["bce", "ce"])
def test_the_parts_are_dice_and_cross_entropy(kind: str) -> None:
    classes = torch.randint(0, 2, (2, 8, 8))
    logits = torch.randn(2, 1 if kind == "bce" else 2, 8, 8)
    parts = [loss(LossConfig(kind, dice=weight), logits, classes) for weight in (0.0, 1.0)]
    if kind == "bce":
        entropy = F.binary_cross_entropy_with_logits(logits[:, 0], classes.float())
        p, t = logits[:, 0].sigmoid(), classes.float()
        dice = 1 - 2 * (p * t).sum() / (p.sum() + t.sum())
    else:
        entropy = F.cross_entropy(logits, classes)
        p, t = logits.softmax(1), F.one_hot(classes, 2).permute(0, 3, 1, 2).float()
        dice = (1 - 2 * (p * t).sum((0, 2, 3)) / (p.sum((0, 2, 3)) + t.sum((0, 2, 3)))).mean()
    torch.testing.assert_close(parts, [entropy, dice])
    torch.testing.assert_close(loss(LossConfig(kind, dice=0.3), logits, classes), 0.7 * entropy + 0.3 * dice)


@pytest.mark.parametrize("kind", ["bce", "ce"])
def test_ignored_pixels_do_not_count(kind: str) -> None:
    classes, logits = torch.randint(0, 2, (1, 8, 8)), torch.randn(1, 1 if kind == "bce" else 2, 8, 8)
    classes[0, :4] = IGNORED
    changed = logits.clone()
    changed[:, :, :4] += 5
    torch.testing.assert_close(*(loss(LossConfig(kind), x, classes) for x in (logits, changed)))
    whole = loss(LossConfig(kind), logits[:, :, 4:], classes[:, 4:])
    torch.testing.assert_close(loss(LossConfig(kind), logits, classes), whole)
    assert loss(LossConfig(kind), logits, torch.full_like(classes, IGNORED)) == 0, "and no NaN where none counts"


def test_half_precision_logits_are_computed_in_float32() -> None:
    classes, logits = torch.randint(0, 2, (1, 8, 8)), torch.randn(1, 1, 8, 8)
    half = loss(LossConfig(), logits.bfloat16(), classes)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, loss(LossConfig(), logits.bfloat16().float(), classes))


def test_class_weights_count_in_the_cross_entropy() -> None:
    classes, logits = torch.randint(0, 3, (1, 8, 8)), torch.randn(1, 3, 8, 8)
    weighted = loss(LossConfig("ce", dice=0.0, class_weights=(1.0, 2.0, 3.0)), logits, classes)
    torch.testing.assert_close(weighted, F.cross_entropy(logits, classes, torch.tensor([1.0, 2.0, 3.0])))
    smooth = loss(LossConfig("ce", dice=0.0), logits, classes, 0.1)
    torch.testing.assert_close(smooth, F.cross_entropy(logits, classes, label_smoothing=0.1))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"class_weights needs loss.kind"):
        LossConfig("bce", class_weights=(1.0, 2.0))
    with pytest.raises(ConfigError, match=r"label_smoothing=0.1 needs"):
        segmentation_loss(LossConfig("bce"), 0.1)
