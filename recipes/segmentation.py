"""Semantic segmentation: the stages of a classification run, where every pixel is classified."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat.onnx.inputs import BATCH_NAME
from qat.runtime.runner import Runner
from qat.training.trainer import LossFn
from recipes.run import Metrics, Run
from recipes.segmentation_config import NetworkConfig, SegmentationConfig
from recipes.segmentation_data import MaskData, load_masks
from recipes.segmentation_losses import segmentation_loss
from recipes.segmentation_metrics import SegmentationMetrics, to_classes
from recipes.segmentation_models import build_network
from recipes.tiling import Predict, predict_images

DYNAMIC_SHAPES = ({0: BATCH_NAME, 2: "height", 3: "width"},)
"""Batch, height and width of the exported file are open."""


def runner_predict(runner: Runner) -> Predict:
    """A runner with one input and one output as a function of tensors, on the CPU."""

    def predict(images: Tensor) -> Tensor:
        outputs = runner.run({runner.input_names[0]: images.float().cpu().contiguous().numpy()})
        return torch.from_numpy(outputs[runner.output_names[0]])

    return predict


class Segmentation(Run):
    """The stages of one seed's run: float training, PTQ by every method, QAT, Q/DQ export, evaluation of each.

    Raises:
        ConfigError: the data cannot be used, or a package is missing.
    """

    metric = "dice"
    float_keys = (*Run.float_keys, "loss")
    config: SegmentationConfig
    data: MaskData

    def load_data(self) -> MaskData:
        """Images and masks on the device."""
        return load_masks(self.config.data, self.device)

    def make_loss(self) -> LossFn:
        """Dice with cross-entropy."""
        return segmentation_loss(self.config.loss, self.config.label_smoothing)

    def build(self, pretrained: bool = True) -> nn.Module:
        """The network."""
        config = self.config.model
        plain = NetworkConfig(config.name, config.encoder, options=config.options)
        return build_network(config if pretrained else plain, self.config.data.channels, self.config.outputs)

    def example_inputs(self) -> tuple[Tensor]:
        """Two calibration patches, shape (2, C, patch, patch), on the CPU."""
        patches: Tensor = next(iter(self.data.calibration))[0]
        two = patches[:2] if len(patches) > 1 else patches.repeat(2, 1, 1, 1)
        return (two.float().cpu(),)

    def export_options(self) -> dict[str, Any]:
        """Batch, height and width are open unless export.dynamic_batch is off; the classes are metadata."""
        dynamic = self.config.export.dynamic_batch
        metadata = {"model": self.config.model.name, "classes": ",".join(self.data.classes)[:1000]}
        shapes = DYNAMIC_SHAPES if dynamic else None
        return {"dynamic_batch": dynamic, "dynamic_shapes": shapes, "metadata": metadata}

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Metrics:
        """Dice and IoU in percent on the validation images, in evaluation mode; the training flag is restored."""
        was_training = model.training
        model.eval()
        try:
            return self._evaluate(model, self.data.val, shared=True)
        finally:
            model.train(was_training)

    def _evaluate(self, predict: Predict, batches: Iterable[Any], shared: bool) -> Metrics:
        metrics = SegmentationMetrics(self.data.classes, self.device, shared)
        for images, masks in batches:
            classes = to_classes(predict_images(predict, images, self.config.inference))
            metrics.update(classes.to(self.device), masks)
        return metrics.compute()

    def evaluate_runner(self, runner: Runner, limit: int | None = None, progress: bool = True) -> Metrics:
        """Metrics of a model behind any runner, image by image, on the first `limit` validation images or all."""
        pairs = (pair for images, masks in self.data.val for pair in zip(images.split(1), masks.split(1), strict=True))
        bar = tqdm(islice(pairs, limit), "evaluate", disable=not progress, leave=False)
        return self._evaluate(runner_predict(runner), bar, shared=False)

    def image_of(self, model: nn.Module, index: int) -> Tensor:
        """Class numbers of one validation image by a torch model, shape (H, W), on the CPU."""
        image = self.data.normalize(self.data.val_pairs[index].image[None].to(self.device))
        with torch.no_grad():
            return to_classes(predict_images(model.eval(), image, self.config.inference))[0].cpu()
