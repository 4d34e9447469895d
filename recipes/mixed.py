"""Mixed precision: the configuration that leaves chosen layers float, its check by PTQ, engines of several choices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from tqdm import tqdm

import qat
from qat.files import atomic_write
from qat.quantizer import named_quantizers
from qat.runtime.data import random_inputs
from qat.selectors import exact
from qat.sensitivity import Point
from qat.sensitivity.proposal import members
from qat.tensorrt import load_engine, measure_engine
from recipes.classification import Classification
from recipes.config import RunConfig, to_plain
from recipes.data import image_shape
from recipes.engines import BuiltEngine, build_for, find_library, half_file
from recipes.models import build_model
from recipes.run import Metrics


def mixed_config(config: RunConfig, names: Iterable[str]) -> RunConfig:
    """The configuration with these layers and operations left float as well, in an output folder of its own.

    Names are written so that each matches itself only. A float model that the run has trained is taken from there.
    """
    quant = replace(config.quant, exclude=(*config.quant.exclude, *map(exact, names)))
    model = config.model
    if model.weights is None and model.checkpoint is None:
        model = replace(model, checkpoint=str(config.folder / "float" / "best.pt"))
    folder = config.folder.with_name(f"{config.folder.name}_mixed")
    return replace(config, output_dir=folder, quant=quant, model=model)


def write_config(config: RunConfig, path: Path, why: str) -> None:
    """Write a configuration as YAML that every classification script takes, atomically.

    Args:
        why: one line of comment on what it is for.
    """
    text = f"# {why}\n# Run: python scripts/qat_finetune.py --config {path}\n"
    with atomic_write(path) as temporary:
        temporary.write_text(text + yaml.safe_dump(to_plain(config), sort_keys=False), encoding="utf-8")


def without(run: Classification, names: Iterable[str]) -> Classification:
    """The same run with these layers and operations left float as well."""
    left = copy.copy(run)
    exclude = (*run.config.quant.exclude, *map(exact, names))
    left.config = replace(run.config, quant=replace(run.config.quant, exclude=exclude))
    return left


def build_without(run: Classification, names: Iterable[str], calibrated: nn.Module) -> nn.Module:
    """The calibrated model with quantizers placed anew and these left float; weights and amax are kept.

    A quantizer that is new there, or has another tensor now, gets the maximum over the calibration images.
    """
    model = build_model(replace(run.config.model, weights=None, checkpoint=None), len(run.data.classes))
    without(run, names).quantize(model)
    model.to(run.device)
    own, kept = model.state_dict(), calibrated.state_dict()
    model.load_state_dict({**own, **{key: value for key, value in kept.items() if key in own}})
    known = {row.name: row.tensors for row in qat.summary(calibrated).quantizers}
    fresh = [row.name for row in qat.summary(model).quantizers if known.get(row.name) != row.tensors]
    if fresh:
        quant, other = run.config.quant, copy.deepcopy(model)
        qat.calibrate(other, run.data.calibration, num_batches=quant.batches, unseen=quant.unseen, progress=False)
        found = dict(named_quantizers(other))
        for name, quantizer in named_quantizers(model):
            amax = found[name].amax
            if name not in fresh:
                continue
            if amax is not None:
                quantizer.amax = amax
            quantizer.set_state(found[name].state, found[name].reason)
    return model


def verify(config: RunConfig) -> Metrics:
    """Metrics of the configuration's PTQ model, made as every script makes it: float, quantizers, calibration."""
    run = Classification(config)
    model = run.float_model()
    run.quantize(model)
    run.calibrate(model)
    return run.evaluate(model)


def spread(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points of the Pareto front, spread over the coverage, its two ends among them."""
    front = [point for point in points if point.best]
    if len(front) <= most:
        return front
    places = {round(number * (len(front) - 1) / max(most - 1, 1)) for number in range(most)}
    return [front[place] for place in sorted(places)]


def engine_points(run: Classification, calibrated: nn.Module, choices: Sequence[Point], folder: Path) -> dict[str, Any]:
    """Build the engine of each choice of float layers of the calibrated model, and measure it where it can run.

    Returns:
        {"skipped": why} without a TensorRT library; else "points": what was float, what was built, and the median
        latency in ms of a batch of `data.eval_batch_size`, or "not_executed" with the reason.

    Raises:
        EngineError: a build fails.
    """
    library = find_library(run.config)
    if isinstance(library, str):
        return {"skipped": library}
    points = []
    for number, choice in enumerate(tqdm(choices, "engines", leave=False)):
        names = members(choice.units)
        path = folder / f"choice{number}.onnx"
        run.export(build_without(run, names, calibrated), path)
        file = half_file(path) if run.config.tensorrt.remainder == "fp16" else path
        built = build_for(run.config, library, file)
        points.append({
            "float": list(names),
            "coverage": choice.coverage,
            "value": choice.value,
            "engine": built.to_dict(),
            "latency_ms": None if built.why_not_run else _latency(run.config, built),
        })  # fmt: skip
    return {"batch": run.config.data.eval_batch_size, "points": points}


def _latency(config: RunConfig, built: BuiltEngine) -> float:
    loaded = load_engine(built.stored.path, built.library)
    batch = config.data.eval_batch_size if config.export.dynamic_batch else 1
    name = loaded.tensor_names("INPUT")[0]
    inputs = random_inputs({name: (batch, *image_shape(config.data))}, {name: "float32"})
    return measure_engine(loaded, inputs).execution.median_ms
