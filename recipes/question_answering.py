"""Question answering with BERT-type encoders: float fine-tuning, PTQ, QAT with distillation, export, evaluation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat import huggingface
from qat.errors import ConfigError, ExportError
from qat.runtime.runner import Runner
from qat.training import DistillConfig, TrainResult
from qat.training.trainer import LossFn
from recipes.qa_config import QaConfig
from recipes.qa_questions import OUTPUT_NAMES, Questions
from recipes.run import Metrics, Run
from recipes.transformers_models import build_encoder, input_names, load_tokenizer, longest_sequence

PLAIN, DISTILLED = "QAT", "QAT + distillation"


def span_loss(label_smoothing: float = 0.0) -> LossFn:
    """Mean cross entropy of first and last token of (inputs, start, end) batches; padding cannot be chosen.

    The logits of padding are masked in what the model returned too, so that a distilled student does not learn them.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, *targets = batch
        output = model(**inputs)
        padding = inputs["attention_mask"] == 0
        for name in OUTPUT_NAMES:
            output[name] = output[name].float().masked_fill(padding, huggingface.MASKED)
        losses = [
            F.cross_entropy(output[name], target, label_smoothing=label_smoothing)
            for name, target in zip(OUTPUT_NAMES, targets, strict=True)
        ]
        return torch.stack(losses).mean()

    return loss


def both_logits(output: Any) -> Sequence[Tensor]:
    """What distillation compares: the logits of first and last token."""
    return [output[name] for name in OUTPUT_NAMES]


class QuestionAnswering(Run):
    """The stages of one run, with every kind of fine-tuning that the configuration asks for."""

    metric = "f1"
    evaluation_keys = (*Run.evaluation_keys, "n_best", "null_threshold", "max_answer_length", "dev")
    script = "scripts/qa_finetune.py"
    calibration_forward = staticmethod(huggingface.run_unpadded)
    compared_logits = staticmethod(both_logits)
    config: QaConfig
    data: Questions

    def load_data(self) -> Questions:
        """The questions, and what they need to know of tokenizer and encoder.

        Raises:
            ConfigError: a window is longer than the encoder's positions.
        """
        config = self.config
        self.tokenizer = load_tokenizer(config.model.name)
        model = self.build(pretrained=False)
        longest = longest_sequence(model, self.tokenizer)
        if config.data.max_length > longest:
            raise ConfigError(
                f"data.max_length={config.data.max_length}, but {config.model.name} has positions for "
                f"{longest} tokens. Use {longest} or less."
            )
        return Questions(config, self.tokenizer, input_names(model, self.tokenizer), self.device)

    def make_loss(self) -> LossFn:
        """Cross entropy of first and last token."""
        return span_loss(self.config.label_smoothing)

    def build(self, pretrained: bool = True) -> nn.Module:
        """The encoder with its head, which is untrained where there is no checkpoint, or `pretrained` is False."""
        model = self.config.model
        return build_encoder(model.name, model.checkpoint if pretrained else None)

    def evaluate(self, model: nn.Module) -> Metrics:
        """Exact match and F1 on the evaluation file."""
        return self.data.evaluate(model)

    def evaluate_runner(self, runner: Runner, limit: int | None = None, progress: bool = True) -> Metrics:
        """Exact match and F1 of a model behind any runner, on the first `limit` questions or all."""
        return self.data.metrics(self.data.answers(runner, limit, progress))

    def example_inputs(self) -> dict[str, Tensor]:
        """Two windows at full length, on the CPU."""
        return self.data.example_inputs()

    def export_options(self) -> dict[str, Any]:
        """Batch and sequence are open."""
        return {
            "dynamic_shapes": {name: {0: "batch", 1: "sequence"} for name in self.data.names},
            "output_names": OUTPUT_NAMES,
            "metadata": {"model": self.config.model.name, "max_length": str(self.config.data.max_length)},
        }

    def place(self, model: nn.Module, example_inputs: Any, options: dict[str, Any]) -> None:
        """Traced placement, the attention included."""
        huggingface.prepare(model, example_inputs, **options)

    def variants(self) -> dict[str, DistillConfig]:
        """The kinds of fine-tuning that the configuration asks for, the one to export last."""
        distill = self.config.qat.distill
        plain = {PLAIN: DistillConfig()} if self.config.compare_distillation or not distill.active else {}
        return {**plain, **({DISTILLED: distill} if distill.active else {})}

    def tuned_folder(self, variant: str, seed: int) -> Path:
        """Where one fine-tuning keeps its checkpoints."""
        return self.config.folder / ("qat" if variant == PLAIN else "qat_distilled") / f"seed{seed}"

    def fine_tune_variant(self, model: nn.Module, variant: str, seed: int) -> tuple[nn.Module, TrainResult, Metrics]:
        """A copy of the calibrated model, fine-tuned; with the metrics of its best epoch in float32."""
        how = replace(self.config.qat, distill=self.variants()[variant])
        tuned, result = self.tune(model, seed, how, self.tuned_folder(variant, seed))
        return tuned, result, self.evaluate(tuned)

    def export(self, model: nn.Module, path: Path, precision: str = "fp32") -> dict[str, Any]:
        """Write an ONNX file with dynamic batch and sequence, checked against torch on real questions of two sizes.

        Returns:
            The report as plain values.

        Raises:
            ExportError: the file cannot be written or computes something else.
        """
        copied = copy.deepcopy(model).cpu()
        if not any(True for _ in qat.named_quantizers(copied)):
            huggingface.expose_attention_(copied, self.example_inputs())
        report = super().export(copied, path, precision)
        if precision == "fp32":
            other = qat.check_parity(copied, path, [self.data.batch(self.data.dev_windows[:3])])
            if not other.passed:
                raise ExportError(f"{path} differs from torch at another batch and sequence: {other.worst()}")
        return report
