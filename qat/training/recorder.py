"""What a run tells its user: progress bar, TensorBoard scalars and history.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from qat.debug.monitor import Monitor
from qat.files import write_json
from qat.quantizer import named_quantizers
from qat.training.config import TrainConfig

EpochRecord = dict[str, Any]
"""One epoch: epoch, step (optimizer steps so far), loss (mean), lr (of its last step), metrics, seconds."""


@dataclass
class Recorder:
    """Writes what the main process has to say; the other processes create one that is silent.

    Attributes:
        folder: the run's output folder.
        config: settings of the run.
        active: True in the main process only.
    """

    folder: Path
    config: TrainConfig
    active: bool

    def __post_init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._writer: Any = None
        self._monitor: Monitor | None = None
        self._steps = 0

    def watch(self, model: nn.Module) -> None:
        """Watch the quantizers of the model from now on, where the configuration asks for it."""
        if self.active and self.config.monitor:
            self._monitor = Monitor(model)

    def open_epoch(self, epoch: int, done: int, steps: int) -> None:
        """Start the bar of an epoch of which `done` of `steps` optimizer steps are behind."""
        if self._monitor is not None:
            self._steps = 0
            self._monitor.watch(True)
        if self.active and self.config.progress:
            self._bar = tqdm(total=steps, initial=done, desc=f"epoch {epoch}/{self.config.epochs - 1}", leave=False)

    def advance(self) -> None:
        """One optimizer step is done."""
        if self._bar is not None:
            self._bar.update()
        if self._monitor is not None:
            self._monitor.step()
            self._steps += 1
            self._monitor.watch(self._steps % self.config.log_every_steps == 0)

    def show(self, loss: float, lr: float) -> None:
        """Put a loss and the learning rate on the bar."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.2e}", refresh=False)

    def close_epoch(self, history: list[EpochRecord], model: nn.Module) -> None:
        """Write the last record of the history, every amax and what the monitor saw to disk."""
        self.close_bar()
        if not self.active:
            return
        record = history[-1]
        write_json(self.folder / "history.json", history)
        if self.config.progress:
            values = ", ".join(f"{name} {value:.4f}" for name, value in record["metrics"].items() if value is not None)
            tqdm.write(f"epoch {record['epoch']}: loss {record['loss']:.4f}, {values}")
        if self.config.tensorboard:
            self._write_scalars(record, model)

    def _write_scalars(self, record: EpochRecord, model: nn.Module) -> None:
        epoch = record["epoch"]
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what a killed run wrote about epochs that are trained again.
            make_writer: Any = SummaryWriter
            self._writer = make_writer(str(self.folder / "tensorboard"), purge_step=epoch)
        scalars = {"train/loss": record["loss"], "train/lr": record["lr"]}
        scalars |= {f"metric/{name}": value for name, value in record["metrics"].items() if value is not None}
        scalars |= {f"amax/{name}": value for name, value in largest_amax(model).items()}
        scalars |= self._monitor.scalars() if self._monitor is not None else {}
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def close_bar(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Close everything; the recorder can be dropped after."""
        self.close_bar()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def largest_amax(model: nn.Module) -> dict[str, float]:
    """Largest amax of each calibrated quantizer by module name, read from the device in one go."""
    found = {
        name: quantizer.amax.detach().max() for name, quantizer in named_quantizers(model) if quantizer.amax is not None
    }
    if not found:
        return {}
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))


def finite_or_none(metrics: dict[str, float]) -> dict[str, float | None]:
    """Metrics as JSON can hold them: NaN and infinities become None."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
