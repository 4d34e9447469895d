"""What `qat benchmark` measures: engines, ONNX files and torch models behind one interface."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qat.cli.engine_options import open_engine
from qat.cli.torch_model import make_torch
from qat.errors import RunnerError
from qat.runtime import OnnxRuntimeRunner, Runner, TorchRunner
from qat.runtime.data import random_inputs
from qat.runtime.latency import Latency, SweepPoint, measure_runner
from qat.runtime.runner import Arrays
from qat.runtime.torch import measure_torch
from qat.tensorrt import TensorRTRunner, measure_engine
from qat.tensorrt.gpu_state import gpu_state

Shapes = dict[str, tuple[int, ...]]


@dataclass
class Subject:
    """One model on one backend, and what was measured of it; `details` by batch size."""

    name: str
    backend: str
    runner: Runner
    dtypes: dict[str, str]
    points: list[SweepPoint] = field(default_factory=list)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        sweep = [vars(point) | {"latency": point.latency and point.latency.to_dict()} for point in self.points]
        return {
            "model": self.name,
            "backend": self.backend,
            "sweep": sweep,
            "details": self.details,
            "layers": self.layers,
        }


def subjects(args: argparse.Namespace, shapes: Shapes) -> Iterator[Subject]:
    """What to measure; each is opened when its turn comes."""
    for path in args.engine:
        runner = open_engine(path, args)
        library = runner.library
        types = {spec.name: spec.dtype for spec in runner.inputs}
        yield Subject(Path(path).name, f"{library.name} {library.version}", runner, types)
    for path in args.onnx:
        session = OnnxRuntimeRunner(path, reference=args.reference)
        types = {spec.name: spec.dtype for spec in session.inputs}
        yield Subject(Path(path).name, "onnxruntime " + ("literal" if args.reference else "fast"), session, types)
    for spec in args.torch:
        for compiled in (False, True)[: 1 + args.compile]:
            model = TorchRunner(make_torch(spec), list(shapes), ["output"], args.device, compiled)
            how = f"torch {'compile' if compiled else 'eager'} on {args.device}"
            yield Subject(spec, how, model, dict.fromkeys(shapes, "float32"))


def measure(args: argparse.Namespace, subject: Subject, shapes: Shapes) -> Latency:
    """Measure one batch; everything but the headline goes into the subject's details."""
    if unknown := set(shapes) - set(subject.dtypes):
        raise RunnerError(f"--shapes names {sorted(unknown)}; the model's inputs are {list(subject.dtypes)}.")
    inputs = random_inputs(shapes, subject.dtypes)
    latency, details = measure_backend(args, subject.runner, inputs)
    subject.details[str(latency.batch)] = {**details, "gpu_state": gpu_state()}
    return latency


def measure_backend(args: argparse.Namespace, runner: Runner, inputs: Arrays) -> tuple[Latency, dict[str, Any]]:
    """The headline latency and the details of one batch."""
    if isinstance(runner, TensorRTRunner):
        timing = measure_engine(runner.loaded, inputs, args.warmUp, args.iterations, args.useCudaGraph, args.infStreams)
        return timing.execution, timing.to_dict()
    if isinstance(runner, TorchRunner):
        execution, with_copies = measure_torch(runner, inputs, args.warmUp, args.iterations)
        return execution, {"execution": execution.to_dict(), "with_copies": with_copies.to_dict()}
    latency = measure_runner(runner, inputs, args.warmUp, args.iterations)
    return latency, {"execution": latency.to_dict()}
