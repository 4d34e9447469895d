"""Distillation: the loss of a task, plus how far the student's outputs and features are from the float model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from qat.distributed import world_size
from qat.errors import ConfigError
from qat.placement.tracing import tensors_in
from qat.selectors import check_globs, match_selector
from qat.training.trainer import LossFn

Logits = Callable[[Any], Sequence[Tensor]]


@dataclass(frozen=True)
class DistillConfig:
    """How much the teacher says; by default nothing.

    Attributes:
        weight: share of the teacher's logits in the loss, the task keeps 1 - weight; 0 to leave them out.
        temperature: logits of both are divided by it in front of the softmax.
        features: name globs of modules whose outputs are compared, e.g. ("layer*.1", "avgpool").
        feature_weight: what the mean feature loss is multiplied by.

    Raises:
        ConfigError: a value outside its range; the message names the field.
    """

    weight: float = 0.0
    temperature: float = 4.0
    features: tuple[str, ...] = ()
    feature_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ConfigError(f"weight={self.weight} is outside 0..1. It is the teacher's share of the loss.")
        if not self.temperature > 0:
            raise ConfigError(f"temperature={self.temperature} is not positive. Use 1 or more.")
        if not self.feature_weight >= 0:
            raise ConfigError(f"feature_weight={self.feature_weight} is negative. Use 0 or more.")

    @property
    def active(self) -> bool:
        """Whether a teacher is needed."""
        return self.weight > 0 or bool(self.features and self.feature_weight)


def first_logits(output: Any) -> Sequence[Tensor]:
    """The first floating-point tensor with a class dimension in what a model returned; auxiliary heads come later."""
    return [t for t in tensors_in(output) if t.is_floating_point() and t.dim() > 1][:1]


def distilled_loss(loss_fn: LossFn, teacher: nn.Module, config: DistillConfig, logits: Logits = first_logits) -> LossFn:
    """A loss function for `fine_tune` that distils `teacher` into the model while it learns the task of `loss_fn`.

        (1 - weight) * task + weight * T^2 * KL(teacher || student)
        + feature_weight * mean over features of mean((student - teacher)^2) / mean(teacher^2)

    KL is between softmax(logits / T) over dimension 1, the mean over all others (Hinton et al. 2015). Features are
    compared by module name (FitNets, Romero et al. 2015), relative to the teacher's power so that one weight suits
    every layer. The model may be wrapped (DDP, accelerate); the hooks that read features last for one call.

    Args:
        loss_fn: loss of the task; it is called with the teacher too, so it decides how a batch is run.
        teacher: float model on the device of training; put in eval mode, else left as it is.
        config: weights, temperature and features.
        logits: the tensors (N, classes, ...) to compare, out of what a model returned.

    Returns:
        `loss(model, batch)`.

    Raises:
        ConfigError: a feature glob matches no module of the teacher. Where it is called: student and teacher have
            different modules, calls or shapes, or features are asked of a model that runs through torch.compile.
    """
    names = _feature_names(teacher, config.features) if config.feature_weight else ()
    teacher.eval()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        student, master = _Recording(model), _Recording(teacher)
        with outputs_of(_unwrapped(model), names) as mine:
            terms = [(1 - config.weight) * loss_fn(student, batch)]  # type: ignore[arg-type]
        with torch.no_grad(), outputs_of(teacher, names) as theirs:
            loss_fn(master, batch)  # type: ignore[arg-type]
        if config.weight:
            pairs = _paired("the output", student.outputs, master.outputs, logits)
            divergences = [_divergence(*pair, config.temperature) for pair in pairs]
            terms.append(config.weight * torch.stack(divergences).mean())
        if names:
            pairs = [pair for name in names for pair in _feature_pairs(name, mine[name], theirs[name])]
            terms.append(config.feature_weight * _feature_loss(pairs))
        return torch.stack(terms).sum()

    return loss


class _Recording:
    """A model for a loss function to call, whose outputs are kept; a hook would not see them under torch.compile."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.outputs: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs.append(self.model(*args, **kwargs))
        return self.outputs[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextmanager
def outputs_of(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """What the modules of these names return inside the block, call by call.

    Raises:
        ConfigError: the model has no such module, or its calls go through torch.compile, where hooks are not seen.
    """
    if names and (hasattr(model, "_orig_mod") or model._compiled_call_impl is not None):
        raise ConfigError(
            f"features={names} cannot be read inside torch.compile. Train with compile=false, or distil logits only."
        )
    modules = dict(model.named_modules())
    check_globs(list(modules), names, type(model).__name__)
    found: dict[str, list[Any]] = {name: [] for name in names}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, output: found[name].append(output)

    with ExitStack() as stack:
        for name in names:
            stack.callback(modules[name].register_forward_hook(keep(name)).remove)
        yield found


def _feature_names(teacher: nn.Module, globs: Sequence[str]) -> tuple[str, ...]:
    names = [name for name, _ in teacher.named_modules() if name]
    check_globs(names, globs, type(teacher).__name__)
    return tuple(name for name in names if match_selector(globs, name, teacher))


def _feature_pairs(name: str, mine: list[Any], theirs: list[Any]) -> list[tuple[Tensor, Tensor]]:
    return _paired(f"feature '{name}'", mine, theirs, lambda out: [t for t in tensors_in(out) if t.is_floating_point()])


def _paired(what: str, mine: list[Any], theirs: list[Any], tensors: Logits) -> list[tuple[Tensor, Tensor]]:
    """Tensors of student and teacher, call by call, in float32."""
    left, right = (list(chain.from_iterable(map(tensors, outputs))) for outputs in (mine, theirs))
    if not left or [t.shape for t in left] != [t.shape for t in right]:
        shapes = [[tuple(t.shape) for t in found] for found in (left, right)]
        raise ConfigError(
            f"distillation: {what} has the tensors {shapes[0]} in the student and {shapes[1]} in the teacher, and they "
            "must be alike, at least one. Take the float version of the student as teacher, and modules that run."
        )
    return [(a.float(), b.float()) for a, b in zip(left, right, strict=True)]


def _divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    log_student, log_teacher = (F.log_softmax(logits / temperature, 1) for logits in (student, teacher))
    divergence = F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(1).mean()
    return temperature**2 * divergence


def _feature_loss(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean over features of the squared distance, relative to the teacher's power over the batches of all ranks."""
    power = torch.stack([teacher.square().mean() for _, teacher in pairs])
    if world_size() > 1:
        dist.all_reduce(power)
        power /= world_size()
    distance = torch.stack([(student - teacher).square().mean() for student, teacher in pairs])
    return (distance / power.clamp_min(1e-12)).mean()
