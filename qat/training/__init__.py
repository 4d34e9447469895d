"""Training, float or quantization-aware: schedules, optimizers, loaders, and a loop that survives being killed."""

from qat.errors import TrainingError
from qat.training.checkpoint import load_best
from qat.training.compiled import recomputed_masks
from qat.training.config import TrainConfig
from qat.training.distillation import DistillConfig, distilled_loss
from qat.training.loader import SeededLoader, SkippableLoader, TrainLoader, make_loader, to_device
from qat.training.loop import TrainResult, fine_tune, supervised_loss
from qat.training.modes import apply_amax_mode, freeze_batch_norm
from qat.training.optim import build_optimizer
from qat.training.schedule import Schedule, qat_epochs

__all__ = [
    "DistillConfig",
    "Schedule",
    "SeededLoader",
    "SkippableLoader",
    "TrainConfig",
    "TrainLoader",
    "TrainResult",
    "TrainingError",
    "apply_amax_mode",
    "build_optimizer",
    "distilled_loss",
    "fine_tune",
    "freeze_batch_norm",
    "load_best",
    "make_loader",
    "qat_epochs",
    "recomputed_masks",
    "supervised_loss",
    "to_device",
]
