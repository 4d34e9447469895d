"""Evaluations of one model with some of its units left float; each is made once and kept in a file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat.distributed import rank
from qat.errors import ConfigError
from qat.files import write_json
from qat.modes import evaluation_mode, passing_through
from qat.quantizer import named_quantizers
from qat.sensitivity.units import Unit, find_units
from qat.training.checkpoint import check_same_run

Metrics = dict[str, float | None]
"""Values by name; None where one is not finite."""
Evaluate = Callable[[nn.Module], Mapping[str, float]]
Build = Callable[[tuple[str, ...]], nn.Module | None]


class Evaluations:
    """Metrics of a calibrated model with any of its units left float.

    The model is the same before and after each evaluation, state dict included, also where `evaluate` raises.

    Args:
        model: a model with calibrated quantizers, from `qat.prepare` or `qat.quantize_`.
        evaluate: metrics of the model as it stands; called in evaluation mode without gradients. Under torchrun all
            processes call it.
        path: JSON file, written after every evaluation; evaluations found in it are not repeated.
        settings: plain values that the file must agree with to be continued: data, number of images.
        build: makes the calibrated model in which these members of units were float from the start, as `exclude` of
            `qat.prepare` does it, or None where that leaves nothing to quantize. Placement decides on some quantizers
            by what surrounds them (that of a residual add by the layer it is fused with), which switching the
            quantizers of `model`, the default, does not show.

    Raises:
        ConfigError: the model is not calibrated, or the file is damaged, of another model or of other settings.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate,
        path: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        build: Build | None = None,
    ) -> None:
        self.model, self.evaluate, self.build = model, evaluate, build
        self.path = None if path is None else Path(path)
        self.units = find_units(model)
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._known: dict[frozenset[int], Metrics] = {}
        # As JSON gives it back: lists, not tuples.
        self._identity: dict[str, Any] = json.loads(json.dumps({**(settings or {}), "weights": fingerprint(model)}))
        if self.path is not None and self.path.exists():
            self._load(self.path)

    def _load(self, path: Path) -> None:
        try:
            saved = json.loads(path.read_text())
            check_same_run(saved["identity"], self._identity, path)
            if saved["units"] != self._members():
                raise ConfigError(f"{path} is of a model whose layers share other quantizers. Remove it to start over.")
            self._known = {frozenset(entry["float"]): dict(entry["metrics"]) for entry in saved["evaluations"]}
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is not a file of evaluations ({error!r}). Remove it to start over.") from error

    def of(self, float_units: Iterable[Unit]) -> Metrics:
        """Metrics with these units float and all others quantized."""
        key = frozenset(self._numbers[unit] for unit in float_units)
        if key not in self._known:
            self._known[key] = self._evaluate(key)
            self._save()
        return dict(self._known[key])

    def known(self) -> list[tuple[tuple[Unit, ...], Metrics]]:
        """Every evaluation so far: the units that were float, and the metrics."""
        return [(tuple(self.units[n] for n in sorted(key)), dict(metrics)) for key, metrics in self._known.items()]

    @torch.no_grad()
    def _evaluate(self, key: frozenset[int]) -> Metrics:
        units = [self.units[number] for number in sorted(key)]
        model: nn.Module | None = self.model
        if self.build is not None and units and len(units) < len(self.units):
            model = self.build(tuple(name for unit in units for name in unit.members))
            units = list(self.units) if model is None else []
        model = model or self.model
        names = {name for unit in units for name in unit.quantizers}
        chosen = [quantizer for name, quantizer in named_quantizers(model) if name in names]
        with evaluation_mode(model), passing_through(chosen):
            metrics = self.evaluate(model)
        return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}

    def _save(self) -> None:
        if self.path is None or rank() != 0:
            return
        entries = [{"float": sorted(key), "metrics": metrics} for key, metrics in self._known.items()]
        write_json(self.path, {"identity": self._identity, "units": self._members(), "evaluations": entries})

    def _members(self) -> list[list[str]]:
        return [list(unit.members) for unit in self.units]


def worth(metrics: Metrics, metric: str, lower_is_better: bool = False) -> float:
    """The metric as a number of which larger is better; -inf where it is not finite.

    Raises:
        ConfigError: evaluate gives no such metric.
    """
    if metric not in metrics:
        raise ConfigError(f"metric={metric!r} is not among those that evaluate gave: {', '.join(metrics)}.")
    value = metrics[metric]
    if value is None:
        return -math.inf
    return -value if lower_is_better else value


def fingerprint(model: nn.Module) -> str:
    """Hash of a state dict: names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()
