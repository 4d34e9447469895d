"""Trainer: the state of a run, and what happens in a step, in an epoch and at a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat.distributed import gather
from qat.errors import ConfigError, TrainingError
from qat.quantizer import named_quantizers
from qat.training.accelerated import broadcast_buffers, from_main_process
from qat.training.amax import MovingAmax, PositiveAmax
from qat.training.checkpoint import BEST, LAST, check_same_run, load_checkpoint, load_model, save_checkpoint
from qat.training.config import TrainConfig
from qat.training.faults import explain_memory, smaller_batch
from qat.training.loader import SkippableLoader, TrainLoader, to_device
from qat.training.modes import freeze_batch_norm
from qat.training.optim import set_learning_rate
from qat.training.recorder import EpochRecord, Recorder, finite_or_none
from qat.training.rng import RngState, capture_rng, restore_rng
from qat.training.silent import silence_is_said

LossFn = Callable[[nn.Module, Any], Tensor]
Evaluate = Callable[[nn.Module], dict[str, float]]


@dataclass
class Position:
    """Where a run is: epoch, batches of it that are done, optimizer steps since the start, best metric so far."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best: float | None = None


@dataclass
class _Losses:
    """Losses of an epoch: those still on the device, and the sum of those read from it."""

    pending: list[Tensor]
    total: float = 0.0
    count: int = 0


class Trainer:
    """One run of `fine_tune`; `resume` before `run` continues an earlier one.

    Args:
        accelerator: of this process.
        model: on its device, with its amax modes set.
        optimizer: over the model's parameters.
        loader: training batches.
        loss_fn: loss of one batch.
        evaluate: validation metrics.
        config: settings.
        folder: output folder.
    """

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: TrainLoader,
        loss_fn: LossFn,
        evaluate: Evaluate,
        config: TrainConfig,
        folder: Path,
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.loader, self.loss_fn, self.evaluate = loader, loss_fn, evaluate
        self.config, self.folder = config, folder
        self.batches = len(loader)
        self.schedule = config.lr_schedule(-(-self.batches // config.accumulate))
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.positive_amax = PositiveAmax([quantizer for _, quantizer in named_quantizers(model)])
        self.moving_amax = MovingAmax([])
        self.position = Position()
        self.history: list[EpochRecord] = []
        self.recorder = Recorder(folder, config, accelerator.is_main_process)
        self._losses = _Losses([])
        self._epoch_rng: RngState = capture_rng()
        self._resumed: dict[str, Any] | None = None
        self._wrapped: nn.Module = model
        self._update: Callable[[], Any] = optimizer.step

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with this one."""
        loader: dict[str, Any] = getattr(self.loader, "identity", {})
        return {
            **self.config.identity(),
            **{f"loader.{name}": value for name, value in loader.items()},
            "world_size": self.accelerator.num_processes,
            "batches_per_epoch": self.batches,
        }

    def resume(self) -> int:
        """Take over from the last checkpoint; returns its optimizer step.

        Raises:
            ConfigError: the checkpoint is damaged, of other settings, or of another model.
        """
        path = self.folder / LAST
        values = load_checkpoint(path)
        check_same_run(values["identity"], self.identity(), path)
        load_model(self.model, values, path)
        self.optimizer.load_state_dict(values["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(values["scaler"])
        self.position = Position(**values["position"])
        self.history = values["history"]
        self._resumed = values["processes"][self.accelerator.process_index]
        return self.position.step

    def run(self, wrapped: nn.Module) -> None:
        """Train to the end with the model as accelerate prepared it.

        Raises:
            TrainingError: the loss or the deciding metric is not finite, or memory ran out.
        """
        self._wrapped = wrapped
        if self.accelerator.scaler is not None:
            self._update = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False).step
        self.optimizer.zero_grad(set_to_none=True)
        self.moving_amax = MovingAmax([quantizer for _, quantizer in named_quantizers(self.model)])
        self.recorder.watch(self.model)
        try:
            while self.position.epoch < self.config.epochs:
                started = time.perf_counter()
                self._train_epoch()
                self._finish_epoch(started)
        finally:
            self.moving_amax.close()
            self.recorder.close()

    def _train_epoch(self) -> None:
        config, position = self.config, self.position
        self._wrapped.train()
        if config.freeze_bn_epoch is not None and position.epoch >= config.freeze_bn_epoch:
            freeze_batch_norm(self._wrapped)
        batches = self._open_epoch()
        self.recorder.open_epoch(
            position.epoch, -(-position.batch // config.accumulate), -(-self.batches // config.accumulate)
        )
        while position.batch < self.batches:
            group = min(config.accumulate, self.batches - position.batch)
            lr = config.lr * self.schedule.factor(position.step)
            set_learning_rate(self.optimizer, lr)
            self._optimizer_step(batches, group)
            position.batch += group
            position.step += 1
            self.recorder.advance()
            if position.step % config.log_every_steps == 0:
                self.recorder.show(self._read_losses(), lr)
            if config.checkpoint_every_steps and position.step % config.checkpoint_every_steps == 0:
                self._save_last()

    def _open_epoch(self) -> Iterator[Any]:
        """The batches left of this epoch, with the generators as they are in an unbroken run."""
        done, self._losses = self.position.batch, _Losses([])
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            # The loader may draw from the generators when an epoch begins, so it must see them as they were then.
            restore_rng(resumed["epoch_rng"])
            self._losses = _Losses([], resumed["loss_total"], resumed["loss_count"])
        self._epoch_rng = capture_rng()
        self.loader.set_epoch(self.position.epoch)
        if done and isinstance(self.loader, SkippableLoader):
            self.loader.skip(done)
            batches = iter(self.loader)
        else:
            batches = iter(self.loader)
            for _ in islice(batches, done):
                pass
        if resumed is not None:
            restore_rng(resumed["rng"])
        return batches

    def _optimizer_step(self, batches: Iterator[Any], group: int) -> None:
        config, accelerator = self.config, self.accelerator
        for index in range(group):
            try:
                batch = next(batches)
            except StopIteration:
                raise ConfigError(
                    f"the loader ended epoch {self.position.epoch} after {self.position.batch + index} batches, but "
                    f"its length is {self.batches}. Make len(loader) the number of batches it gives."
                ) from None
            first = self.position.step == index == 0 and config.compile == "no"  # hooks would break up its graph
            with self._explain_memory(batch), silence_is_said(self.model) if first else nullcontext():
                self._losses.pending.append(self._forward_backward(batch, group, index == group - 1))
        with self._explain_memory(batch):
            if config.clip_norm is not None:
                accelerator.clip_grad_norm_(self.parameters, config.clip_norm)
            self._update()
        self.optimizer.zero_grad(set_to_none=True)
        self.positive_amax.apply()
        self.moving_amax.apply()

    def _forward_backward(self, batch: Any, group: int, last: bool) -> Tensor:
        """Gradients of one of the `group` batches of a step, added to those there; returns its loss."""
        accelerator = self.accelerator
        batch = to_device(batch, accelerator.device, self.config.channels_last)
        # Gradients of all processes are summed once, with the last batch of the group.
        with nullcontext() if last else accelerator.no_sync(self._wrapped):
            with accelerator.autocast():
                loss = self.loss_fn(self._wrapped, batch)
            # In this thread: autograd's own threads and this one would pass Python's lock to and fro at every node.
            with torch.autograd.set_multithreading_enabled(False):
                accelerator.backward(loss if group == 1 else loss / group)
        return loss.detach()

    def _explain_memory(self, batch: Any) -> AbstractContextManager[None]:
        where = f"epoch {self.position.epoch}, optimizer step {self.position.step} (both from 0)"
        return explain_memory(where, partial(smaller_batch, batch, self.config.accumulate, self.config.mixed_precision))

    def _read_losses(self) -> float:
        """Read the pending losses from the device, the only wait for it between checkpoints; returns the last."""
        losses = self._losses
        if not losses.pending:
            return losses.total / max(losses.count, 1)
        values: list[float] = torch.stack(losses.pending).double().tolist()
        losses.pending = []
        for number, value in enumerate(values, start=losses.count):
            if not math.isfinite(value):
                accumulate = self.config.accumulate
                step = self.position.step - -(-self.position.batch // accumulate) + number // accumulate
                raise TrainingError(
                    f"the loss is {value} in epoch {self.position.epoch}, optimizer step {step} (both from 0). Lower "
                    "lr, set clip_norm, lengthen warmup_epochs, or look for NaN in the data; checkpoints before it "
                    f"are in {self.folder}."
                )
            losses.total += value
            losses.count += 1
        return values[-1]

    def _finish_epoch(self, started: float) -> None:
        position, config = self.position, self.config
        self._read_losses()
        sums: Any = gather([self._losses.total, float(self._losses.count)])
        total, count = (sum(column) for column in zip(*sums, strict=True))
        broadcast_buffers(self.model)
        metrics = self._metrics()
        record: EpochRecord = {
            "epoch": position.epoch,
            "step": position.step,
            "loss": total / count,
            "lr": config.lr * self.schedule.factor(position.step - 1),
            "metrics": finite_or_none(metrics),
            "seconds": round(time.perf_counter() - started, 3),
        }
        self.history.append(record)
        if position.best is None or metrics[config.metric] > position.best:
            position.best = metrics[config.metric]
            if self.accelerator.is_main_process:
                best = {"model": self.model.state_dict(), "epoch": position.epoch, "metrics": metrics}
                save_checkpoint(self.folder / BEST, {**best, "identity": self.identity()})
        self.recorder.close_epoch(self.history, self.model)
        position.epoch += 1
        position.batch = 0
        self._losses = _Losses([])
        self._save_last(epoch_ended=True)

    def _metrics(self) -> dict[str, float]:
        self.model.eval()
        where = f"the evaluation after epoch {self.position.epoch} (from 0)"
        with torch.no_grad(), explain_memory(where, lambda: "Evaluate smaller batches."):
            metrics = self.evaluate(self.model)
        metrics = {name: float(value) for name, value in from_main_process(metrics).items()}
        name = self.config.metric
        if name not in metrics:
            raise ConfigError(
                f"metric={name!r} is not among the metrics that evaluate gave: {', '.join(metrics) or 'none'}. "
                "Set metric to one of them."
            )
        if not math.isfinite(metrics[name]):
            raise TrainingError(
                f"metric {name!r} is {metrics[name]} after epoch {self.position.epoch} (from 0). Lower lr, or look "
                "for NaN in the validation data."
            )
        return metrics

    def _save_last(self, epoch_ended: bool = False) -> None:
        self._read_losses()
        rng = capture_rng()
        mine = {
            "rng": rng,
            "epoch_rng": rng if epoch_ended else self._epoch_rng,
            "loss_total": self._losses.total,
            "loss_count": self._losses.count,
        }
        processes = gather(mine)
        if not self.accelerator.is_main_process:
            return
        scaler = self.accelerator.scaler
        save_checkpoint(
            self.folder / LAST,
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "position": asdict(self.position),
                "history": self.history,
                "identity": self.identity(),
                "processes": processes,
            },
        )
