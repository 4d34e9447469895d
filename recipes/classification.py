"""Image classification: float training, PTQ by every method, QAT, Q/DQ export and the evaluation of each."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import qat
from qat.calibration import MethodResult, collect_stats, compare_methods, use_histograms
from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_TENSOR
from qat.distributed import rank, world_size
from qat.errors import ConfigError
from qat.files import atomic_write
from qat.ptq import equalize, improve
from qat.runtime.runner import Runner, fixed_batch, run_in_batches
from qat.training import TrainConfig, TrainResult, distilled_loss, fine_tune, qat_epochs, supervised_loss
from qat.training.accelerated import make_accelerator
from qat.training.trainer import LossFn
from recipes.config import RunConfig, to_plain
from recipes.data import ImageData, Loader, load_data
from recipes.models import build_model, load_weights, read_checkpoint
from recipes.stages import claim

Metrics = dict[str, float]


def pick_device(name: str) -> torch.device:
    """The device of this process; ConfigError where a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda but torch sees no GPU. Use device=cpu, or install a CUDA build of torch.")
    if name == "cpu" or not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def classification_loss(label_smoothing: float = 0.0) -> Any:
    """Cross entropy; auxiliary heads (GoogLeNet, Inception) count 0.3 each (Szegedy et al. 2014)."""

    def loss(output: Any, labels: Tensor) -> Tensor:
        heads = [output] if isinstance(output, Tensor) else [head for head in output if head is not None]
        losses = [F.cross_entropy(head, labels, label_smoothing=label_smoothing) for head in heads]
        total: Tensor = losses[0] + 0.3 * torch.stack(losses)[1:].sum()
        return total

    return loss


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, device: torch.device, progress: bool = False) -> Metrics:
    """Top-1 and top-5 in percent and mean cross entropy, over all ranks, in float32; the training flag is restored."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in tqdm(loader, "evaluate", disable=not progress, leave=False):
        x, y = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        totals += batch_totals(model(x).float(), y)
    model.train(was_training)
    if world_size() > 1:
        dist.all_reduce(totals)
    return to_metrics(totals)


def batch_totals(logits: Tensor, labels: Tensor) -> Tensor:
    """Correct within the first, correct within the first five, summed loss, count; float64, shape (4,)."""
    hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    count = torch.tensor(len(labels), device=loss.device)
    return torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss.double(), count.double()])


def to_metrics(totals: Tensor) -> Metrics:
    """Percentages and mean loss from summed `batch_totals`."""
    top1, top5, loss, count = totals.tolist()
    if not count:
        raise ConfigError("there are no validation images. Check data.dir.")
    return {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "val_loss": loss / count}


class Classification:
    """The stages of one run; each keeps its results in its own folder and is resumed or reused from there.

    Attributes:
        metric: the key of `evaluate`'s result that chooses the best method of calibration.
        float_keys: parts of the configuration that decide the float model.
    """

    metric = "top1"
    float_keys = ("seed", "label_smoothing", "model", "data", "float_train")

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        # Joins the other processes of torchrun: the loaders below give each rank its share.
        make_accelerator("no")
        self.data = self.load_data()
        self.loss = self.make_loss()
        self.main = rank() == 0
        plain = to_plain(config)
        self._float_settings = {key: plain[key] for key in self.float_keys}
        for key in ("workers", "eval_batch_size", "dir"):
            self._float_settings["data"].pop(key, None)
        self._quant_settings = {**self._float_settings, "quant": plain["quant"]}
        self._qat_settings = {**self._quant_settings, "qat": {k: v for k, v in plain["qat"].items() if k != "seeds"}}

    def load_data(self) -> ImageData:
        """The loaders."""
        return load_data(self.config.data, self.config.seed, self.device)

    def make_loss(self) -> LossFn:
        """The loss of a batch."""
        return supervised_loss(classification_loss(self.config.label_smoothing))

    def build(self, pretrained: bool = True) -> nn.Module:
        """The network, with the weights that the configuration names unless `pretrained` is False."""
        model = self.config.model if pretrained else replace(self.config.model, weights=None, checkpoint=None)
        return build_model(model, len(self.data.classes))

    def evaluate(self, model: nn.Module) -> Metrics:
        """Metrics on the validation images."""
        return evaluate(model, self.data.val, self.device)

    def example_input(self) -> Tensor:
        """Two validation images, shape (2, 3, size, size), on the CPU."""
        images: Tensor = next(iter(self.data.val))[0]
        return images[:2].float().cpu()

    def float_model(self) -> nn.Module:
        """The float model: from the weights or checkpoint the configuration names, else trained here."""
        config = self.config
        torch.manual_seed(config.seed)
        model = self.build().to(self.device)
        if config.model.weights is None and config.model.checkpoint is None:
            claim(config.folder / "float", self._float_settings, self.main)
            train = replace(config.float_train, seed=config.seed, amax_mode="frozen")
            self._train(model, self.loss, train, config.folder / "float")
        return model

    def _train(self, model: nn.Module, loss: LossFn, train: TrainConfig, folder: Path) -> TrainResult:
        """Train with the order, the augmentation and the dropout of `train.seed`."""
        return fine_tune(model, self.data.train(train.seed), loss, self.evaluate, train, folder)

    def quantize(self, model: nn.Module) -> dict[str, str]:
        """Insert the quantizers that the configuration chooses, in place; returns what stays float, and why."""
        quant = self.config.quant
        weights = None if quant.per_channel else QUANT_DESC_8BIT_WEIGHT_PER_TENSOR
        include = quant.include or None
        if "equalize" in quant.improve:
            images = next(iter(self.data.calibration))[0].to(next(model.parameters()).device)
            equalize(model, images, replace_relu6=quant.replace_relu6)
        if quant.placement == "modules":
            qat.quantize_(model, include=include, exclude=quant.exclude, weight_desc=weights)
        else:
            example = self.example_input().to(next(model.parameters()).device)
            qat.prepare(model, example, include=include, exclude=quant.exclude, weight_desc=weights)
        return qat.summary(model).left_float

    def calibrate(self, model: nn.Module) -> list[MethodResult]:
        """Collect once, compute and evaluate each method, leave the best loaded, then do what improves it.

        Saves each method and each improvement, and the model as it is left, in ptq/model.pt.
        """
        quant = self.config.quant
        if quant.calibrator == "histogram":
            use_histograms(model)
        batches = -(-quant.batches // world_size())
        collect_stats(model, self.data.calibration, num_batches=batches, progress=self.main)
        methods = quant.all_methods()
        current = iter(methods)

        def keep_and_evaluate(calibrated: nn.Module) -> Metrics:
            self.save(calibrated, self.config.ptq_file(next(current)))
            return self.evaluate(calibrated)

        results = compare_methods(model, keep_and_evaluate, self.metric, methods, quant.unseen)
        results += self._improve(model, max(results, key=lambda result: result.metrics[self.metric]).method, batches)
        self.save(model, self.config.folder / "ptq" / "model.pt")
        return results

    def _improve(self, model: nn.Module, method: str, batches: int) -> list[MethodResult]:
        """The steps after calibration, one on top of the other; a result of each."""
        quant = self.config.quant
        results: list[MethodResult] = []

        def keep_and_evaluate(step: str) -> None:
            name = f"{results[-1].method if results else method} + {step}"
            self.save(model, self.config.ptq_file(name))
            results.append(MethodResult(name, self.evaluate(model)))

        steps = [step for step in quant.improve if step != "equalize"]
        if steps:
            data = self.config.data
            count = -(-batches * data.eval_batch_size // data.batch_size)
            improve(
                model,
                self.data.calibration,
                steps,
                num_batches=batches,
                norm_batches=islice(self.data.train(self.config.seed), count),
                rounding=quant.rounding,
                progress=self.main,
                after=keep_and_evaluate,
            )
        return results

    def fine_tune(self, model: nn.Module, seed: int) -> tuple[nn.Module, TrainResult]:
        """A copy of the calibrated model, fine-tuned; checkpoints in qat/seed<N>."""
        config = self.config
        folder = config.folder / "qat" / f"seed{seed}"
        claim(folder, self._qat_settings, self.main)
        length = config.qat.float_epochs or config.float_train.epochs
        epochs = config.qat.epochs or qat_epochs(length, config.qat.share)
        tuned = copy.deepcopy(model)
        loss = self.loss
        if config.qat.distill.active:
            loss = distilled_loss(loss, self.load_float(), config.qat.distill)
        result = self._train(tuned, loss, replace(config.qat.train, epochs=epochs, seed=seed), folder)
        self.save(tuned, folder / "model.pt")
        return tuned, result

    def save(self, model: nn.Module, path: Path) -> None:
        """State dict, written atomically by the main process."""
        if self.main:
            with atomic_write(path) as temporary:
                torch.save(model.state_dict(), temporary)

    def load_float(self) -> nn.Module:
        """The float model as `float_model` left it, without training.

        Raises:
            ConfigError: it was not trained yet, or with other settings.
        """
        config, folder = self.config, self.config.folder / "float"
        model = self.build()
        if config.model.weights is None and config.model.checkpoint is None:
            if not (folder / "best.pt").exists():
                raise ConfigError(f"there is no {folder / 'best.pt'}. Run scripts/qat_finetune.py first.")
            claim(folder, self._float_settings, write=False)
            load_weights(model, read_checkpoint(folder / "best.pt"), folder / "best.pt")
        return model.to(self.device)

    def load_quantized(self, path: Path) -> nn.Module:
        """The quantized model with the weights and amax of a checkpoint from `calibrate` or `fine_tune`."""
        model = self.build(pretrained=False)
        self.quantize(model)
        load_weights(model, read_checkpoint(path), path)
        return model.to(self.device)

    def dynamic_shapes(self) -> Any:
        """`qat.export`'s dynamic_shapes; None for export.dynamic_batch."""
        return None

    def export(self, model: nn.Module, path: Path, precision: str = "fp32") -> dict[str, Any]:
        """Write the Q/DQ file, checked against torch on real images; returns the report as plain values.

        `precision` is that of all that is not INT8; the check is made before the file is typed.
        """
        options = self.config.export
        report = qat.export(
            copy.deepcopy(model).cpu(),
            (self.example_input(),),
            path,
            opset=options.opset,
            precision=precision,
            dynamic_batch=options.dynamic_batch,
            dynamic_shapes=self.dynamic_shapes(),
            int8_weights=options.int8_weights,
            metadata={"model": self.config.model.name, "classes": ",".join(self.data.classes)[:1000]},
        )
        parity = report.parity
        assert parity is not None
        return {
            "opset": report.opset,
            "precision": report.precision,
            "bytes": report.size,
            "quantizers": len(report.quantized),
            "left_float": dict(report.passthrough),
            "unused": list(report.unused),
            "largest_relative_difference": max(row.relative for row in parity.layers),
            "codes_that_differ": sum(row.mismatched for row in parity.layers),
            "outputs": to_plain(parity.outputs),
        }

    def evaluate_onnx(self, path: Path, limit: int | None = None, progress: bool = True) -> Metrics:
        """Metrics of an ONNX file in ONNX Runtime on the CPU, run literally (reference settings)."""
        from qat.runtime import OnnxRuntimeRunner

        return self.evaluate_runner(OnnxRuntimeRunner(path), limit, progress)

    def evaluate_runner(self, runner: Runner, limit: int | None = None, progress: bool = True) -> Metrics:
        """Metrics of a model with one input and one output behind any runner, on the first `limit` images or all."""
        totals = torch.zeros(4, dtype=torch.float64)
        for images, labels in tqdm(self.data.val, "evaluate", disable=not progress, leave=False):
            batch = {runner.input_names[0]: images.float().cpu().numpy()}
            outputs = run_in_batches(runner, batch, fixed_batch(runner) or len(images), pad_last=True)
            totals += batch_totals(torch.from_numpy(outputs[runner.output_names[0]]), labels.cpu())
            if limit is not None and totals[3] >= limit:
                break
        return to_metrics(totals)
