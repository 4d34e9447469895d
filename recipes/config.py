"""The configuration of a run: YAML, command line and the checks before anything runs; RunConfig is classification's."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from qat.calibration import METHODS, parse_method
from qat.errors import ConfigError, refuse_below_one
from qat.ptq import RoundingConfig, ordered_steps
from qat.training import DistillConfig, TrainConfig

DEFAULT_CONFIG = Path(__file__).resolve().parents[1] / "configs" / "digits.yaml"
SHORT_NAMES = {
    "--calibrator": "--quant.calibrator",
    "--percentiles": "--quant.percentiles",
    "--per-channel": "--quant.per_channel",
    "--num-calib-batches": "--quant.batches",
    "--data-dir": "--data.dir",
    "--batch-size": "--data.batch_size",
    "--image-size": "--data.image_size",
    "--threshold": "--export.threshold",
}


@dataclass(frozen=True)
class ModelConfig:
    """Which network.

    Attributes:
        name: any torchvision classifier.
        weights: torchvision weights such as "DEFAULT" or "IMAGENET1K_V1"; null for random ones.
        checkpoint: file or URL of float weights; null trains a float model first, unless `weights` is given.
        options: further arguments of torchvision's constructor, e.g. {stochastic_depth_prob: 0.1}.
        undo_strides: how many of the first downsampling layers keep the resolution instead; 2 suits images of 32 px.
    """

    name: str = "efficientnet_b0"
    weights: str | None = None
    checkpoint: str | None = None
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    undo_strides: int = 0

    @property
    def is_trained(self) -> bool:
        """Whether float weights are given, so that none are trained."""
        return self.weights is not None or self.checkpoint is not None


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how they become batches.

    Attributes:
        name: "digits" (handwriting inside scikit-learn) or "imagefolder" (dir/train/<class>/..., dir/val/<class>/...).
        dir: the ImageFolder's root.
        image_size: side of the square network input, pixels.
        resize_size: side of the shorter edge before the centre crop in evaluation; null for image_size / 0.875.
        batch_size: training batch of one process.
        eval_batch_size: batch for evaluation and calibration.
        workers: processes that decode images.
        corrupt: what happens to image files that cannot be read: "error", or "skip" to read every file once before
            anything runs and go on without them; they are listed in the log and the results.
        in_memory: decode everything once, keep it on the device and augment there; for small images of one size.
        crop_padding: with in_memory, pixels of padding before the random crop.
        flip: mirror images at random; off for digits.
        erase: with in_memory, side of a random square blanked out, as a share of the image; 0 for none.
        cutmix: with in_memory, share of the images that get a box of another one (CutMix); their labels are mixed too.
        mean: per-channel mean of images in [0, 1].
        std: per-channel standard deviation.
    """

    name: Literal["digits", "imagefolder"] = "digits"
    dir: Path | None = None
    image_size: int = 32
    resize_size: int | None = None
    batch_size: int = 64
    eval_batch_size: int = 128
    workers: int = 2
    corrupt: Literal["error", "skip"] = "error"
    in_memory: bool = False
    crop_padding: int = 0
    flip: bool = False
    erase: float = 0.0
    cutmix: float = 0.0
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.name == "imagefolder" and self.dir is None:
            raise ConfigError("data.dir is not set. Give the folder that holds train/ and val/: --data-dir FOLDER.")
        refuse_below_one(self, "image_size", "batch_size", "eval_batch_size", group="data.")


@dataclass(frozen=True)
class QuantConfig:
    """What is quantized, and how amax is found.

    Attributes:
        calibrator: "histogram" compares every method, "max" takes the maximum only.
        methods: methods compared on one collection; the best is where fine-tuning starts.
        percentiles: percentiles tried by the method "percentile".
        batches: calibration batches, from the training images.
        placement: "traced" puts quantizers where TensorRT wants them, residual adds included (`qat.prepare`);
            "modules" puts them at every convolution and linear layer (`qat.quantize_`).
        per_channel: one scale per output channel for weights, else one per tensor.
        include: name globs of the layers to quantize; empty for every convolution and linear layer.
        exclude: name globs of layers left float.
        unseen: what happens to a quantizer that no calibration batch reaches: "error" or "float".
        improve: of "equalize", before calibration, and "adaround", "correct_bias", "reestimate_bn" after it.
        replace_relu6: let "equalize" turn ReLU6 into ReLU, which it cannot pass otherwise.
        rounding: settings of "adaround".
    """

    calibrator: Literal["histogram", "max"] = "histogram"
    methods: tuple[str, ...] = METHODS
    percentiles: tuple[float, ...] = (99.99,)
    batches: int = 8
    placement: Literal["traced", "modules"] = "traced"
    per_channel: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    unseen: Literal["error", "float"] = "error"
    improve: tuple[str, ...] = ()
    replace_relu6: bool = False
    rounding: RoundingConfig = field(default_factory=RoundingConfig)

    def __post_init__(self) -> None:
        for method in self.all_methods():
            parse_method(method)
        ordered_steps(self.improve)
        if not self.methods or self.batches < 1:
            raise ConfigError(f"quant.methods={self.methods}, quant.batches={self.batches}: each needs at least one.")

    def all_methods(self) -> tuple[str, ...]:
        """Methods with the percentiles written out; only "max" with the max calibrator."""
        if self.calibrator == "max":
            return ("max",)
        spelled: list[str] = []
        for method in self.methods:
            spelled += [f"percentile={p:g}" for p in self.percentiles] if method == "percentile" else [method]
        return tuple(spelled)


@dataclass(frozen=True)
class QatConfig:
    """Fine-tuning from the best PTQ model.

    Attributes:
        share: epochs of fine-tuning as a share of the float schedule.
        epochs: epochs of fine-tuning; null for the share.
        float_epochs: length of the original float schedule; null for `float_train.epochs`.
        seeds: one run each; the tables show their mean and standard deviation.
        distill: what the float model of the run teaches; nothing by default.
        train: the other settings; its `epochs` and `seed` are replaced.
    """

    share: float = 0.1
    epochs: int | None = None
    float_epochs: int | None = None
    seeds: tuple[int, ...] = (0,)
    distill: DistillConfig = field(default_factory=DistillConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(lr=0.005, metric="top1"))


@dataclass(frozen=True)
class ExportConfig:
    """The Q/DQ file.

    Attributes:
        opset: ONNX opset, 13 or more.
        int8_weights: store quantized weights as INT8.
        dynamic_batch: leave the batch dimension open.
        threshold: largest allowed loss of top-1, in points, from the torch QAT model to the ONNX file.
        eval_images: images for the ONNX evaluation; null for all.
    """

    opset: int = 21
    int8_weights: bool = True
    dynamic_batch: bool = True
    threshold: float = 0.5
    eval_images: int | None = None


@dataclass(frozen=True)
class TensorRTConfig:
    """The engine at the end of a run.

    Attributes:
        build: "auto" builds where a TensorRT library is installed, "always" fails without one, "never" skips it.
        library: "tensorrt" or "tensorrt_rtx"; null for the first installed.
        remainder: type of everything that is not INT8.
        compute_capability: what TensorRT for RTX builds for where this machine cannot run its engines.
        min_int8: percent of the weighted operations that must run in INT8; null for no limit.
    """

    build: Literal["auto", "always", "never"] = "auto"
    library: Literal["tensorrt", "tensorrt_rtx"] | None = None
    remainder: Literal["fp16", "float32"] = "fp16"
    compute_capability: str = "8.9"
    min_int8: float | None = None


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        output_dir: where checkpoints, files and results go; null for runs/<data>_<model>.
        label_smoothing: of the cross-entropy loss.
        device: "auto", "cpu" or "cuda".
    """

    output_dir: Path | None = None
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    label_smoothing: float = 0.0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    float_train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=30, lr=0.05, metric="top1"))
    qat: QatConfig = field(default_factory=QatConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tensorrt: TensorRTConfig = field(default_factory=TensorRTConfig)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.output_dir or Path("runs") / f"{self.data.name}_{self.model.name}"

    def ptq_file(self, method: str) -> Path:
        """Checkpoint of the model calibrated by one method."""
        return self.folder / "ptq" / f"{method.replace('=', '-').replace(' ', '')}.pt"


Config = TypeVar("Config", bound=RunConfig)


def build_parser(
    description: str, config_type: type = RunConfig, short_names: Mapping[str, str] = SHORT_NAMES
) -> ArgumentParser:
    """The parser of a recipe's scripts: --config FILE, and one option for every field of the configuration."""
    short = ", ".join(f"{short} for {name}" for short, name in short_names.items())
    parser = ArgumentParser(description=description, epilog=f"Short names: {short}.", exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file; options after it override its values")
    parser.add_class_arguments(config_type)
    return parser


def parse(
    parser: ArgumentParser,
    args: Sequence[str],
    config_type: type[Config] = RunConfig,  # type: ignore[assignment]
    default: Path = DEFAULT_CONFIG,
    short_names: Mapping[str, str] = SHORT_NAMES,
) -> tuple[Config, Namespace]:
    """Parse and check; also the namespace, with what a script added. Without --config: the default's values.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type or value, unreadable file.
    """
    if not any(arg.partition("=")[0] == "--config" for arg in args):
        args = ["--config", str(default), *args]
    spelled = []
    for arg in args:
        option, equals, value = arg.partition("=")
        spelled.append(short_names.get(option, option) + equals + value)
    try:
        namespace = parser.parse_args(spelled)
        built = parser.instantiate_classes(namespace)
    except ArgumentError as error:
        known = known_keys(config_type) + [short.removeprefix("--") for short in short_names]
        raise ConfigError(_explain(str(error), known)) from error
    except TypeError as error:
        raise ConfigError(f"a group of the configuration is not a mapping of its fields: {error}") from error
    names = [f.name for f in fields(config_type)]
    return config_type(**{name: built[name] for name in names}), namespace


def known_keys(cls: type = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key of a configuration, groups included."""
    keys = []
    for name, hint in get_type_hints(cls).items():
        keys.append(prefix + name)
        if is_dataclass(hint) and isinstance(hint, type):
            keys += known_keys(hint, f"{prefix}{name}.")
    return keys


UNKNOWN_KEY = (
    r"unrecognized arguments: --([\w.-]+)",
    r"Group '([\w.]+)' does not accept option '([\w.]+)'",
    r"Option '([\w.]+)' is not accepted",
)
"""How jsonargparse names an unknown key: on the command line, in a group, at the top of a file."""


def _explain(message: str, known: Sequence[str]) -> str:
    """The parser's message, with the nearest known key where it names an unknown one."""
    match = next((found for pattern in UNKNOWN_KEY if (found := re.search(pattern, message))), None)
    if match is None:
        return message
    key = ".".join(match.groups())
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(key.split(".")[0], known, n=1, cutoff=0.5)
    return f"unknown configuration key '{key}'." + (f" Did you mean '{near[0]}'?" if near else "")


def to_plain(value: Any) -> Any:
    """A configuration as plain values, for YAML and JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
