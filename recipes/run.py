"""The stages that the recipes share: float training, PTQ by every method, QAT, Q/DQ export."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

import qat
from qat.calibration import MethodResult, collect_stats, compare_methods, run_batch, to_device, use_histograms
from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_TENSOR
from qat.distributed import rank, world_size
from qat.errors import ConfigError
from qat.files import atomic_write, remove_leftovers
from qat.locks import hold_folder
from qat.ptq import equalize, improve
from qat.runtime import OnnxRuntimeRunner
from qat.runtime.runner import Runner
from qat.training import TrainConfig, TrainResult, distilled_loss, fine_tune, qat_epochs
from qat.training.accelerated import make_accelerator
from qat.training.distillation import first_logits
from qat.training.faults import explain_loading, explain_memory
from qat.training.trainer import LossFn
from recipes.config import QatConfig, RunConfig, to_plain
from recipes.models import load_weights, read_checkpoint
from recipes.stages import claim

Metrics = dict[str, float]
SMALLER_EVALUATION = "Lower data.eval_batch_size; that needs no new output folder."


def pick_device(name: str) -> torch.device:
    """The device of this process; ConfigError where a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda but torch sees no GPU. Use device=cpu, or install a CUDA build of torch.")
    if name == "cpu" or not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class Run:
    """The stages of one run; each keeps its results in its own folder and is resumed or reused from there.

    A recipe says what its data, network, loss and metrics are.

    Attributes:
        metric: the key of `evaluate`'s result that chooses the best method of calibration.
        float_keys: parts of the configuration that decide the float model.
        evaluation_keys: fields of its `data` that do not.
        script: what trains the float model, for errors.
        calibration_forward: how a batch of `data.calibration` is run.
        compared_logits: what distillation compares, out of what the model returned.
        data: has `train(seed)` and `calibration`, batches for training and calibration.
    """

    metric: str
    float_keys: tuple[str, ...] = ("seed", "label_smoothing", "model", "data", "float_train")
    evaluation_keys: tuple[str, ...] = ("workers", "eval_batch_size", "dir", "corrupt")
    script = "scripts/qat_finetune.py"
    calibration_forward = staticmethod(run_batch)
    compared_logits = staticmethod(first_logits)
    data: Any

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
        for key in self.evaluation_keys:
            self._float_settings["data"].pop(key, None)
        self._quant_settings = {**self._float_settings, "quant": plain["quant"]}
        self._lock: IO[bytes] | None = None

    def load_data(self) -> Any:
        """The data, on the device or in loaders."""
        raise NotImplementedError

    def make_loss(self) -> LossFn:
        """The loss of a batch."""
        raise NotImplementedError

    def build(self, pretrained: bool = True) -> nn.Module:
        """The network, with the weights that the configuration names unless `pretrained` is False."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> Metrics:
        """Metrics on the validation data; the training flag is restored."""
        raise NotImplementedError

    def evaluate_runner(self, runner: Runner, limit: int | None = None, progress: bool = True) -> Metrics:
        """Metrics of a model behind any runner, on the first `limit` samples of the validation data or all."""
        raise NotImplementedError

    def example_inputs(self) -> Any:
        """What the model is traced and exported with, on the CPU: a tuple, or a mapping of keywords."""
        raise NotImplementedError

    def export_options(self) -> dict[str, Any]:
        """The arguments of `qat.export` that are the recipe's own."""
        raise NotImplementedError

    def hold(self) -> None:
        """Keep the folder for this run and clean it after killed ones; ConfigError where another process has it."""
        if self._lock is None and self.main:
            folder = self.config.folder
            self._lock = hold_folder(folder)
            for part in (folder, folder / "ptq"):
                remove_leftovers(part)

    def float_model(self) -> nn.Module:
        """The float model: from the weights or checkpoint the configuration names, else trained here."""
        self.hold()
        config = self.config
        torch.manual_seed(config.seed)
        model = self.build().to(self.device)
        if not config.model.is_trained:
            claim(config.folder / "float", self._float_settings, self.main)
            train = replace(config.float_train, seed=config.seed, amax_mode="frozen")
            self._train(model, self.loss, train, config.folder / "float")
        return model

    def load_float(self) -> nn.Module:
        """The float model as `float_model` left it, without training.

        Raises:
            ConfigError: it was not trained yet, or with other settings.
        """
        config, folder = self.config, self.config.folder / "float"
        model = self.build()
        if not config.model.is_trained:
            if not (folder / "best.pt").exists():
                raise ConfigError(f"there is no {folder / 'best.pt'}. Run {self.script} first.")
            claim(folder, self._float_settings, write=False)
            load_weights(model, read_checkpoint(folder / "best.pt"), folder / "best.pt")
        return model.to(self.device)

    def _train(self, model: nn.Module, loss: LossFn, train: TrainConfig, folder: Path) -> TrainResult:
        """Train with the order, the augmentation and the dropout of `train.seed`."""
        return fine_tune(model, self.data.train(train.seed), loss, self.evaluate, train, folder)

    def quantize(self, model: nn.Module) -> dict[str, str]:
        """Insert the quantizers that the configuration chooses, in place; returns what stays float, and why."""
        quant, device = self.config.quant, next(model.parameters()).device
        options: dict[str, Any] = {
            "include": quant.include or None,
            "exclude": quant.exclude,
            "weight_desc": None if quant.per_channel else QUANT_DESC_8BIT_WEIGHT_PER_TENSOR,
        }
        if "equalize" in quant.improve:
            images = next(iter(self.data.calibration))[0].to(device)
            equalize(model, images, replace_relu6=quant.replace_relu6)
        if quant.placement == "modules":
            qat.quantize_(model, **options)
        else:
            self.place(model, to_device(self.example_inputs(), device), options)
        return qat.summary(model).left_float

    def place(self, model: nn.Module, example_inputs: Any, options: dict[str, Any]) -> None:
        """Traced placement, in place."""
        qat.prepare(model, example_inputs, **options)

    def calibrate(self, model: nn.Module) -> list[MethodResult]:
        """Collect once, compute and evaluate each method, leave the best loaded, then do what improves it.

        Saves each method and each improvement, and the model as it is left, in ptq/model.pt.
        """
        self.hold()
        quant = self.config.quant
        if quant.calibrator == "histogram":
            use_histograms(model)
        batches = -(-quant.batches // world_size())
        with explain_loading(lambda: "calibration"), explain_memory("calibration", lambda: SMALLER_EVALUATION):
            collect_stats(
                model, self.data.calibration, num_batches=batches, forward=self.calibration_forward, progress=self.main
            )
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
        return self.tune(model, seed, self.config.qat, self.config.folder / "qat" / f"seed{seed}")

    def tune(self, model: nn.Module, seed: int, how: QatConfig, folder: Path) -> tuple[nn.Module, TrainResult]:
        """A copy of the calibrated model, fine-tuned as `how` says; checkpoints in `folder`."""
        self.hold()
        settings = {key: value for key, value in to_plain(how).items() if key != "seeds"}
        claim(folder, {**self._quant_settings, "qat": settings}, self.main)
        epochs = how.epochs or qat_epochs(how.float_epochs or self.config.float_train.epochs, how.share)
        tuned = copy.deepcopy(model)
        loss = self.loss
        if how.distill.active:
            loss = distilled_loss(loss, self.load_float(), how.distill, self.compared_logits)
        result = self._train(tuned, loss, replace(how.train, epochs=epochs, seed=seed), folder)
        self.save(tuned, folder / "model.pt")
        return tuned, result

    def save(self, model: nn.Module, path: Path) -> None:
        """State dict, written atomically by the main process."""
        if self.main:
            with atomic_write(path) as temporary:
                torch.save(model.state_dict(), temporary)

    def load_quantized(self, path: Path) -> nn.Module:
        """The quantized model with the weights and amax of a checkpoint from `calibrate` or `fine_tune`."""
        model = self.build(pretrained=False)
        self.quantize(model)
        load_weights(model, read_checkpoint(path), path)
        return model.to(self.device)

    def export(self, model: nn.Module, path: Path, precision: str = "fp32") -> dict[str, Any]:
        """Write the Q/DQ file, checked against torch on real data; returns the report as plain values.

        `precision` is that of all that is not INT8; the check is made before the file is typed.
        """
        options = self.config.export
        report = qat.export(
            copy.deepcopy(model).cpu(),
            self.example_inputs(),
            path,
            opset=options.opset,
            precision=precision,
            int8_weights=options.int8_weights,
            **self.export_options(),
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
            "largest_relative_difference": max((row.relative for row in parity.layers), default=0.0),
            "codes_that_differ": sum(row.mismatched for row in parity.layers),
            "outputs": to_plain(parity.outputs),
        }

    def evaluate_onnx(self, path: Path, limit: int | None = None, progress: bool = True) -> Metrics:
        """Metrics of an ONNX file in ONNX Runtime on the CPU, run literally (reference settings)."""
        return self.evaluate_runner(OnnxRuntimeRunner(path), limit, progress)
