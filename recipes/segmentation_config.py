"""The configuration of a segmentation run: that of classification, with other networks, data and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from qat.errors import ConfigError, refuse_below_one
from qat.training import TrainConfig
from recipes.config import SHORT_NAMES, QatConfig, RunConfig, parse

DEFAULT_SEGMENTATION = Path(__file__).resolve().parents[1] / "configs" / "membrane_unet.yaml"
SEGMENTATION_SHORT_NAMES: Mapping[str, str] = {
    **{short: name for short, name in SHORT_NAMES.items() if name != "--data.image_size"},
    "--data_dir": "--data.dir",
}
STRIDE = 32
"""Sides of what a network is given are multiples of this: encoders halve the size five times."""


@dataclass(frozen=True)
class NetworkConfig:
    """Which network.

    Attributes:
        name: an architecture of segmentation-models-pytorch ("unet", "unetplusplus", "linknet", "fpn", ...), or a
            segmentation network of torchvision ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large").
        encoder: with segmentation-models-pytorch, any of its encoders.
        weights: with segmentation-models-pytorch, weights of the encoder such as "imagenet"; with torchvision, of the
            backbone such as "IMAGENET1K_V1". null for random ones.
        checkpoint: file or URL of float weights; null trains a float model first.
        options: further arguments of the constructor, e.g. {decoder_interpolation: bilinear}.
    """

    name: str = "unet"
    encoder: str = "resnet34"
    weights: str | None = None
    checkpoint: str | None = None
    options: dict[str, bool | int | float | str | list[int]] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """Whether float weights are given, so that none are trained; `weights` are those of the encoder only."""
        return self.checkpoint is not None

    @property
    def label(self) -> str:
        """Network and encoder in one word; torchvision's names say both."""
        return self.name if "_" in self.name else f"{self.name}_{self.encoder}"


@dataclass(frozen=True)
class AugmentConfig:
    """Random changes of a training patch; those of the geometry move image and mask together.

    Attributes:
        flip: mirror at random, left to right and top to bottom.
        rotate: largest rotation, degrees.
        scale: largest change of size, as a share: 0.2 for 0.8 to 1.2.
        elastic: standard deviation of a smooth random displacement, pixels.
        brightness: largest change of brightness, as a share of the full range.
        contrast: largest change of contrast, as a share.
    """

    flip: bool = True
    rotate: float = 0.0
    scale: float = 0.0
    elastic: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0


@dataclass(frozen=True)
class MaskDataConfig:
    """Which images and masks, and how they become patches.

    Attributes:
        name: what the tables and the output folder call the data. "digits" without `dir` makes pages of the
            handwritten digits inside scikit-learn.
        dir: holds images/ and masks/, with equal file names but for the suffix; or train/ and val/ that do.
        val_share: without train/ and val/, the share of the files that is kept for validation.
        split_seed: seed of that split, apart from the seeds of training: every run validates on the same images.
        class_names: in the order of `mask_values`.
        mask_values: grey value in the masks of each class.
        ignore_value: grey value of pixels that count for nothing; null for none.
        channels: 3 (grey images are repeated) or 1.
        patch: side of a training patch, pixels.
        patches: training patches of an epoch.
        balance: share of the patches whose centre is a pixel of a class drawn with equal chances, so that a rare class
            is seen; the others lie anywhere. Calibration always draws them so.
        batch_size: training batch of one process, patches.
        eval_batch_size: validation images of one size, and calibration patches, that are run at once.
        augment: random changes of training patches.
        mean: per-channel mean of images in [0, 1].
        std: per-channel standard deviation.
    """

    name: str = "masks"
    dir: Path | None = None
    val_share: float = 0.2
    split_seed: int = 0
    class_names: tuple[str, ...] = ("background", "object")
    mask_values: tuple[int, ...] = (0, 255)
    ignore_value: int | None = None
    channels: Literal[1, 3] = 3
    patch: int = 256
    patches: int = 256
    balance: float = 0.0
    batch_size: int = 16
    eval_batch_size: int = 4
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)

    def __post_init__(self) -> None:
        if len(self.class_names) != len(self.mask_values) or len(set(self.mask_values)) < 2:
            raise ConfigError(
                f"data.class_names={self.class_names} and data.mask_values={self.mask_values}: give a name and a "
                "different value for each class, two classes at least."
            )
        if self.patch < STRIDE or self.patch % STRIDE:
            raise ConfigError(f"data.patch={self.patch} is not a multiple of {STRIDE}. Use {STRIDE}, 64, 128, ...")
        refuse_below_one(self, "patches", "batch_size", "eval_batch_size", group="data.")
        for name in ("val_share", "balance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"data.{name}={getattr(self, name)} is outside 0..1. Use a number in between.")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ConfigError(f"data.{name}={getattr(self, name)}: give one number, or {self.channels}.")


@dataclass(frozen=True)
class LossConfig:
    """The loss of a batch of pixels.

    Attributes:
        kind: "bce" for two classes and one logit (that of the second class), "ce" for a logit each.
        dice: weight of the Dice loss, 0..1; the rest is that of the cross-entropy.
        class_weights: with "ce", a weight for each class in the cross-entropy, for classes of very different sizes.
    """

    kind: Literal["bce", "ce"] = "bce"
    dice: float = 0.5
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dice <= 1:
            raise ConfigError(f"loss.dice={self.dice} is outside 0..1. Use a number in between.")
        if self.class_weights is not None and self.kind == "bce":
            raise ConfigError('loss.class_weights needs loss.kind="ce".')


@dataclass(frozen=True)
class InferenceConfig:
    """How an image of any size is run.

    Attributes:
        tile: side of a tile, pixels, a multiple of 32.
        overlap: share of a tile's side that it shares with the next; blended.
        batch: tiles that are run at once.
        whole: images whose sides are at most this are run whole, filled up to multiples of 32.
    """

    tile: int = 256
    overlap: float = 0.25
    batch: int = 8
    whole: int = 1024

    def __post_init__(self) -> None:
        if self.tile < STRIDE or self.tile % STRIDE:
            raise ConfigError(f"inference.tile={self.tile} is not a multiple of {STRIDE}. Use 256 or 512.")
        if not 0 <= self.overlap <= 0.5:
            raise ConfigError(f"inference.overlap={self.overlap} is outside 0..0.5. Use 0.25.")
        refuse_below_one(self, "batch", group="inference.")


@dataclass(frozen=True)
class SegmentationConfig(RunConfig):
    """A whole run; `label_smoothing` is that of the cross-entropy.

    Attributes:
        seeds: one run of everything each, from the float model on; the tables show mean and standard deviation.
    """

    seeds: tuple[int, ...] = (0,)
    model: NetworkConfig = field(default_factory=NetworkConfig)  # type: ignore[assignment]
    data: MaskDataConfig = field(default_factory=MaskDataConfig)  # type: ignore[assignment]
    loss: LossConfig = field(default_factory=LossConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    float_train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=30, metric="dice"))
    qat: QatConfig = field(default_factory=lambda: QatConfig(train=TrainConfig(metric="dice")))

    def __post_init__(self) -> None:
        classes = len(self.data.class_names)
        if self.loss.kind == "bce" and classes != 2:
            raise ConfigError(f'loss.kind="bce" is for two classes, and data.class_names has {classes}. Use "ce".')
        weights = self.loss.class_weights
        if weights is not None and len(weights) != classes:
            raise ConfigError(f"loss.class_weights={weights}: give {classes} numbers, one for each class.")
        if not self.seeds:
            raise ConfigError("seeds is empty. Give one at least.")

    @property
    def outputs(self) -> int:
        """Channels of the logits."""
        return 1 if self.loss.kind == "bce" else len(self.data.class_names)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.output_dir or Path("runs") / f"{self.data.name}_{self.model.label}"

    def for_seed(self, seed: int) -> SegmentationConfig:
        """The configuration of one seed, in a folder of its own."""
        return replace(
            self, seed=seed, seeds=(seed,), qat=replace(self.qat, seeds=(seed,)), output_dir=self.folder / f"seed{seed}"
        )


def parse_segmentation(parser: ArgumentParser, args: Sequence[str]) -> tuple[SegmentationConfig, Namespace]:
    """`recipes.config.parse` for this recipe; without --config: configs/membrane_unet.yaml."""
    return parse(parser, args, SegmentationConfig, DEFAULT_SEGMENTATION, SEGMENTATION_SHORT_NAMES)
