"""fine_tune: the training loop, for float training and quantization-aware training alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import ConfigError
from qat.files import remove_leftovers
from qat.locks import hold_folder
from qat.training.accelerated import make_accelerator, prepared_model
from qat.training.checkpoint import BEST, LAST, load_checkpoint, load_model
from qat.training.config import TrainConfig
from qat.training.faults import explain_loading
from qat.training.loader import TrainLoader
from qat.training.modes import apply_amax_mode
from qat.training.optim import build_optimizer
from qat.training.recorder import EpochRecord
from qat.training.rng import seed_all
from qat.training.trainer import Evaluate, LossFn, Trainer


@dataclass(frozen=True)
class TrainResult:
    """What a run gave.

    Attributes:
        best_metric: largest value of the deciding metric.
        best_epoch: epoch, counted from 0, whose weights the model now has.
        metrics: all metrics of that epoch.
        history: one record per epoch, as in history.json.
        steps: optimizer steps of the whole run.
        resumed_at_step: where this process took over, or None if it began the run.
        best_checkpoint: file of the best weights.
        last_checkpoint: file that the run would resume from.
    """

    best_metric: float
    best_epoch: int
    metrics: dict[str, float]
    history: tuple[EpochRecord, ...]
    steps: int
    resumed_at_step: int | None
    best_checkpoint: Path
    last_checkpoint: Path


def supervised_loss(criterion: Callable[[Any, Any], Tensor]) -> LossFn:
    """A loss function for batches that are (input, target) pairs: `criterion(model(input), target)`."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs, target = batch
        return criterion(model(inputs), target)

    return loss_fn


def fine_tune(
    model: nn.Module,
    loader: TrainLoader,
    loss_fn: LossFn,
    evaluate: Evaluate,
    config: TrainConfig,
    output_dir: str | Path,
) -> TrainResult:
    """Train model and leave it in eval mode with the weights of its best epoch.

    Called again with the same arguments after a kill, it continues from the last checkpoint in `output_dir` and, on
    a CPU, ends with the same weights bit for bit, provided that the loader gives the same batches for the same
    epoch (`make_loader` does). A run that had ended only loads its best weights. Under torchrun it trains with DDP;
    all processes must then see the same `output_dir`.

    Args:
        model: moved to the device and trained in place.
        loader: training batches of this process.
        loss_fn: `loss_fn(model, batch)` gives a scalar, the mean over the batch; the model it is given may be wrapped.
            `supervised_loss(criterion)` makes one for (input, target) batches.
        evaluate: `evaluate(model)` gives the validation metrics. Called after each epoch in every process, in eval
            mode, without gradients and under the run's mixed precision; the main process's result counts.
        config: settings.
        output_dir: best.pt, last.pt, history.json and tensorboard/ are written here.

    Returns:
        The metrics of the best epoch, the history and the files.

    Raises:
        ConfigError: another process works in the folder, it holds a run with other settings or a damaged checkpoint,
            the loader or the metric does not fit, or fp16 is asked for without a GPU.
        TrainingError: the loss or the deciding metric became NaN or infinite, memory ran out, or a worker of the
            loader died; the message names epoch and step.
        WriteError: the folder cannot be written.
    """
    _check_loader(loader)
    folder = Path(output_dir)
    accelerator = make_accelerator(config.mixed_precision)
    with hold_folder(folder) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            remove_leftovers(folder)
        accelerator.wait_for_everyone()
        optimizer = _prepare(model, accelerator, config)
        trainer = Trainer(accelerator, model, optimizer, loader, loss_fn, evaluate, config, folder)
        resumed_at = trainer.resume() if (folder / LAST).exists() else None
        _run(trainer, model)
        accelerator.wait_for_everyone()
    best = load_checkpoint(folder / BEST)
    load_model(model, best, folder / BEST)
    model.eval()
    return TrainResult(
        best_metric=best["metrics"][config.metric],
        best_epoch=best["epoch"],
        metrics=best["metrics"],
        history=tuple(trainer.history),
        steps=trainer.position.step,
        resumed_at_step=resumed_at,
        best_checkpoint=folder / BEST,
        last_checkpoint=folder / LAST,
    )


def _prepare(model: nn.Module, accelerator: Any, config: TrainConfig) -> torch.optim.Optimizer:
    """Seed this process and make the model ready to train, in place; returns its optimizer."""
    seed_all(config.seed + accelerator.process_index)
    model.to(accelerator.device)
    if config.channels_last:
        _to_channels_last(model)
    apply_amax_mode(model, config.amax_mode)
    return build_optimizer(
        model, config.optimizer, config.lr, config.weight_decay, config.momentum, config.amax_lr_factor
    )


def _run(trainer: Trainer, model: nn.Module) -> None:
    with (
        explain_loading(lambda: f"epoch {trainer.position.epoch} of training"),
        prepared_model(trainer.accelerator, model, trainer.config.compile) as wrapped,
    ):
        trainer.run(wrapped)


def _check_loader(loader: TrainLoader) -> None:
    if not isinstance(loader, TrainLoader):
        raise ConfigError(
            f"the loader, a {type(loader).__name__}, has no set_epoch, so an epoch could not be repeated after a kill. "
            "Make it with qat.training.make_loader, or give it __len__, __iter__ and set_epoch."
        )
    if len(loader) == 0:
        raise ConfigError("the loader has no batch. Use a smaller batch size or drop_last=False.")


def _to_channels_last(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
