"""TrainConfig: the settings of one training run, float or quantization-aware."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from qat.errors import ConfigError, refuse_below_one
from qat.training.schedule import Schedule, ScheduleName

_NO_EFFECT = {"changes_result": False}


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run; epochs and steps are counted from 0.

    Attributes:
        epochs: passes over the training data.
        optimizer: "sgd" or "adamw".
        lr: base learning rate, reached at the end of the warm-up.
        amax_lr_factor: learning rate of learned amax as a multiple of lr.
        weight_decay: decay of weights; biases, norm parameters and amax have none.
        momentum: momentum of SGD; AdamW ignores it.
        schedule: "cosine" or "step", annealed per optimizer step.
        warmup_epochs: length of the linear warm-up; a fraction of an epoch is fine.
        final_lr_factor: where cosine ends, as a share of lr.
        step_epochs: for "step", epochs between two decays; null for a third of the run.
        step_gamma: for "step", what one decay multiplies the learning rate by.
        mixed_precision: "no", "bf16" or "fp16" autocast; fp16 needs a GPU.
        accumulate: batches whose gradients one optimizer step averages.
        clip_norm: largest norm of the gradient; null to leave it alone.
        freeze_bn_epoch: from this epoch on BatchNorm uses and keeps its running statistics; null for never.
        amax_mode: "frozen", "reestimated" or "learned".
        channels_last: store 4-D weights and inputs channels-last, faster for convolutions on a GPU.
        compile: "default" or "reduce-overhead" (CUDA graphs) to train and evaluate through torch.compile in that mode.
        seed: seed of the random generators.
        metric: the key of `evaluate`'s result that decides the best checkpoint; larger is better.
        checkpoint_every_steps: optimizer steps between checkpoints inside an epoch; 0 for the ends of epochs only.
        log_every_steps: optimizer steps between two reads of the loss from the device.
        tensorboard: write TensorBoard scalars.
        progress: show a progress bar.
        monitor: write oscillating weights and clipped shares to TensorBoard too; a step then costs a little more.

    Raises:
        ConfigError: a value outside its range; the message names the field.
    """

    epochs: int = 10
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.01
    amax_lr_factor: float = 1.0
    weight_decay: float = 1e-4
    momentum: float = 0.9
    schedule: ScheduleName = "cosine"
    warmup_epochs: float = 0.0
    final_lr_factor: float = 0.0
    step_epochs: float | None = None
    step_gamma: float = 0.1
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    accumulate: int = 1
    clip_norm: float | None = None
    freeze_bn_epoch: int | None = None
    amax_mode: Literal["frozen", "reestimated", "learned"] = "frozen"
    channels_last: bool = False
    compile: Literal["no", "default", "reduce-overhead"] = "no"
    seed: int = 0
    metric: str = "accuracy"
    checkpoint_every_steps: int = field(default=500, metadata=_NO_EFFECT)
    log_every_steps: int = field(default=20, metadata=_NO_EFFECT)
    tensorboard: bool = field(default=True, metadata=_NO_EFFECT)
    progress: bool = field(default=True, metadata=_NO_EFFECT)
    monitor: bool = field(default=False, metadata=_NO_EFFECT)

    def __post_init__(self) -> None:
        self._check_choices()
        refuse_below_one(self, "epochs", "accumulate", "log_every_steps")
        if self.checkpoint_every_steps < 0:
            raise ConfigError(f"checkpoint_every_steps={self.checkpoint_every_steps} is below 0. Use 0 or more.")
        for name in ("weight_decay", "warmup_epochs", "amax_lr_factor"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative. Use 0 or more.")
        for name in ("lr", "step_gamma", "clip_norm", "step_epochs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} is not positive. Use a number above 0.")
        for name in ("final_lr_factor", "momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is outside 0..1. Use a number in between.")
        if self.freeze_bn_epoch is not None and self.freeze_bn_epoch < 0:
            raise ConfigError(
                f"freeze_bn_epoch={self.freeze_bn_epoch} is negative. Use 0 for all epochs, null for never."
            )
        if self.monitor and (self.compile != "no" or not self.tensorboard):
            raise ConfigError(
                f"monitor=true needs tensorboard=true and compile=no, not tensorboard={self.tensorboard}, "
                f"compile={self.compile}: it writes to TensorBoard, and cannot see into a compiled model."
            )
        if self.warmup_epochs > self.epochs:
            raise ConfigError(
                f"warmup_epochs={self.warmup_epochs} is longer than epochs={self.epochs}. Shorten the warm-up."
            )

    def _check_choices(self) -> None:
        choices = {
            "optimizer": ("sgd", "adamw"),
            "schedule": ("cosine", "step"),
            "mixed_precision": ("no", "bf16", "fp16"),
            "amax_mode": ("frozen", "reestimated", "learned"),
            "compile": ("no", "default", "reduce-overhead"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown. Use one of: {', '.join(allowed)}.")

    def lr_schedule(self, steps_per_epoch: int) -> Schedule:
        """The schedule of this run, for a loader that gives `steps_per_epoch` optimizer steps an epoch."""
        step_epochs = self.epochs / 3 if self.step_epochs is None else self.step_epochs
        return Schedule(
            total_steps=self.epochs * steps_per_epoch,
            kind=self.schedule,
            warmup_steps=round(self.warmup_epochs * steps_per_epoch),
            final_factor=self.final_lr_factor,
            decay_steps=max(round(step_epochs * steps_per_epoch), 1),
            gamma=self.step_gamma,
        )

    def identity(self) -> dict[str, Any]:
        """The fields that change the trained weights; a resumed run must have the same."""
        skipped = {name for name, f in self.__dataclass_fields__.items() if not f.metadata.get("changes_result", True)}
        return {name: value for name, value in asdict(self).items() if name not in skipped}
