"""Question answering with BERT-type encoders: float fine-tuning, PTQ, QAT with distillation, export, evaluation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat import huggingface
from qat.calibration import MethodResult, collect_stats, compare_methods, use_histograms
from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_TENSOR
from qat.distributed import rank, world_size
from qat.errors import ConfigError, ExportError
from qat.files import atomic_write
from qat.training import DistillConfig, TrainConfig, TrainResult, distilled_loss, fine_tune, qat_epochs
from qat.training.accelerated import make_accelerator
from qat.training.trainer import LossFn
from recipes.classification import pick_device
from recipes.config import to_plain
from recipes.models import load_weights, read_checkpoint
from recipes.qa_config import QaConfig
from recipes.qa_questions import OUTPUT_NAMES, Metrics, Questions
from recipes.stages import claim
from recipes.transformers_models import build_encoder, input_names, load_tokenizer, longest_sequence

PLAIN, DISTILLED = "QAT", "QAT + distillation"
_ONLY_EVALUATION = ("workers", "eval_batch_size", "dir", "n_best", "null_threshold", "max_answer_length", "dev")


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


class QuestionAnswering:
    """The stages of one run; each keeps its results in its own folder and is resumed or reused from there."""

    def __init__(self, config: QaConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        make_accelerator("no")
        self.main = rank() == 0
        self.tokenizer = load_tokenizer(config.model.name)
        names = input_names(self.new_model(), self.tokenizer)
        self.questions = Questions(config, self.tokenizer, names, self.device)
        self.loss = span_loss(config.label_smoothing)
        plain = to_plain(config)
        self._float_settings = {k: plain[k] for k in ("seed", "label_smoothing", "model", "data", "float_train")}
        for key in _ONLY_EVALUATION:
            del self._float_settings["data"][key]
        self._quant_settings = {**self._float_settings, "quant": plain["quant"]}

    def new_model(self) -> nn.Module:
        """The encoder as the configuration names it, its head untrained; ConfigError where a window does not fit."""
        model = build_encoder(self.config.model.name)
        longest = longest_sequence(model, self.tokenizer)
        if self.config.data.max_length > longest:
            raise ConfigError(
                f"data.max_length={self.config.data.max_length}, but {self.config.model.name} has positions for "
                f"{longest} tokens. Use {longest} or less."
            )
        return model

    def float_model(self) -> nn.Module:
        """The float model: from the checkpoint that the configuration names, else fine-tuned here."""
        config = self.config
        torch.manual_seed(config.seed)
        model = build_encoder(config.model.name, config.model.checkpoint).to(self.device)
        if config.model.checkpoint is None:
            folder = config.folder / "float"
            claim(folder, self._float_settings, self.main)
            self._train(model, self.loss, replace(config.float_train, seed=config.seed, amax_mode="frozen"), folder)
        return model

    def load_float(self) -> nn.Module:
        """The float model as `float_model` left it, without training.

        Raises:
            ConfigError: it was not trained yet, or with other settings.
        """
        config, folder = self.config, self.config.folder / "float"
        model = build_encoder(config.model.name, config.model.checkpoint)
        if config.model.checkpoint is None:
            if not (folder / "best.pt").exists():
                raise ConfigError(f"there is no {folder / 'best.pt'}. Run scripts/qa_finetune.py first.")
            claim(folder, self._float_settings, write=False)
            load_weights(model, read_checkpoint(folder / "best.pt"), folder / "best.pt")
        return model.to(self.device)

    def _train(self, model: nn.Module, loss: LossFn, train: TrainConfig, folder: Path) -> TrainResult:
        return fine_tune(model, self.questions.train_loader(train.seed), loss, self.questions.evaluate, train, folder)

    def quantize(self, model: nn.Module) -> dict[str, str]:
        """Insert the quantizers that the configuration chooses, in place; returns what stays float, and why."""
        quant = self.config.quant
        options: dict[str, Any] = {
            "include": quant.include or None,
            "exclude": quant.exclude,
            "weight_desc": None if quant.per_channel else QUANT_DESC_8BIT_WEIGHT_PER_TENSOR,
        }
        if quant.placement == "modules":
            qat.quantize_(model, **options)
        else:
            device = next(model.parameters()).device
            example = {name: tensor.to(device) for name, tensor in self.questions.example_inputs().items()}
            huggingface.prepare(model, example, **options)
        return qat.summary(model).left_float

    def calibrate(self, model: nn.Module) -> list[MethodResult]:
        """Collect once without padding, compute and evaluate each method, leave the best in the model and in ptq/."""
        quant = self.config.quant
        if quant.calibrator == "histogram":
            use_histograms(model)
        batches = islice(self.questions.calibration_batches(), -(-quant.batches // world_size()))
        collect_stats(model, batches, forward=huggingface.run_unpadded, progress=self.main)
        methods = quant.all_methods()
        current = iter(methods)

        def keep_and_evaluate(calibrated: nn.Module) -> Metrics:
            self.save(calibrated, self.config.ptq_file(next(current)))
            return self.questions.evaluate(calibrated)

        results = compare_methods(model, keep_and_evaluate, "f1", methods, quant.unseen)
        self.save(model, self.config.folder / "ptq" / "model.pt")
        return results

    def variants(self) -> dict[str, DistillConfig]:
        """The kinds of fine-tuning that the configuration asks for, the one to export last."""
        distill = self.config.qat.distill
        plain = {PLAIN: DistillConfig()} if self.config.compare_distillation or not distill.active else {}
        return {**plain, **({DISTILLED: distill} if distill.active else {})}

    def tuned_folder(self, variant: str, seed: int) -> Path:
        """Where one fine-tuning keeps its checkpoints."""
        return self.config.folder / ("qat" if variant == PLAIN else "qat_distilled") / f"seed{seed}"

    def fine_tune(self, model: nn.Module, variant: str, seed: int) -> tuple[nn.Module, TrainResult, Metrics]:
        """A copy of the calibrated model, fine-tuned; with the metrics of its best epoch in float32."""
        config, folder = self.config, self.tuned_folder(variant, seed)
        distill = self.variants()[variant]
        settings = {k: v for k, v in to_plain(config.qat).items() if k != "seeds"}
        claim(folder, {**self._quant_settings, "qat": {**settings, "distill": to_plain(distill)}}, self.main)
        length = config.qat.float_epochs or config.float_train.epochs
        epochs = config.qat.epochs or qat_epochs(length, config.qat.share)
        loss = self.loss
        if distill.active:
            loss = distilled_loss(loss, self.load_float(), distill, both_logits)
        tuned = copy.deepcopy(model)
        result = self._train(tuned, loss, replace(config.qat.train, epochs=epochs, seed=seed), folder)
        self.save(tuned, folder / "model.pt")
        return tuned, result, self.questions.evaluate(tuned)

    def save(self, model: nn.Module, path: Path) -> None:
        """State dict, written atomically by the main process."""
        if self.main:
            with atomic_write(path) as temporary:
                torch.save(model.state_dict(), temporary)

    def load_quantized(self, path: Path) -> nn.Module:
        """The quantized model with the weights and amax of a checkpoint from `calibrate` or `fine_tune`."""
        model = build_encoder(self.config.model.name)
        self.quantize(model)
        load_weights(model, read_checkpoint(path), path)
        return model.to(self.device)

    def export(self, model: nn.Module, path: Path, precision: str = "fp32") -> dict[str, Any]:
        """Write an ONNX file with dynamic batch and sequence, checked against torch on real questions of two sizes.

        Returns:
            The report as plain values.

        Raises:
            ExportError: the file cannot be written or computes something else.
        """
        options = self.config.export
        copied = copy.deepcopy(model).cpu()
        example = self.questions.example_inputs()
        if not any(True for _ in qat.named_quantizers(copied)):
            huggingface.expose_attention_(copied, example)
        report = qat.export(
            copied,
            example,
            path,
            opset=options.opset,
            precision=precision,
            dynamic_shapes={name: {0: "batch", 1: "sequence"} for name in self.questions.names},
            int8_weights=options.int8_weights,
            output_names=OUTPUT_NAMES,
            metadata={"model": self.config.model.name, "max_length": str(self.config.data.max_length)},
        )
        if precision == "fp32":
            other = qat.check_parity(copied, path, [self.questions.batch(self.questions.dev_windows[:3])])
            if not other.passed:
                raise ExportError(f"{path} differs from torch at another batch and sequence: {other.worst()}")
        assert report.parity is not None
        return {
            "opset": report.opset,
            "precision": report.precision,
            "bytes": report.size,
            "quantizers": len(report.quantized),
            "unused": list(report.unused),
            "codes_that_differ": sum(row.mismatched for row in report.parity.layers),
            "largest_relative_difference": max((row.relative for row in report.parity.layers), default=0.0),
        }
