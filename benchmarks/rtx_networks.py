"""The networks of the placement benchmark; needs torch and torchvision only, so that any environment can import it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SHAPE = (8, 3, 224, 224)
"""Batch, channels, height, width of every input."""
CALIBRATION_BATCHES = 2


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, weights=None)
        return model

    return build


def _unet() -> nn.Module:
    import segmentation_models_pytorch as smp

    model: nn.Module = smp.Unet("resnet34", encoder_weights=None, classes=21)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": _torchvision("resnet50"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "mobilenet_v2": _torchvision("mobilenet_v2"),
    "densenet121": _torchvision("densenet121"),
    "unet_resnet34": _unet,
    "vit_b_16": _torchvision("vit_b_16"),
}


def build_network(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A network in evaluation mode with random weights, and the calibration batches; the same in every process.

    BatchNorm holds the statistics of one batch, as activations of an untrained network vanish or explode without.
    """
    torch.manual_seed(0)
    model = NETWORKS[name]()
    batches = [torch.randn(SHAPE) for _ in range(CALIBRATION_BATCHES)]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)  # torchvision starts ViT's head at zero, which has no scale
    with torch.no_grad():
        model.train()(batches[0])
    return model.eval(), batches
