#!/usr/bin/env python
"""Measure models on TensorRT, ONNX Runtime and torch side by side, for one batch or a sweep of batch sizes.

    python scripts/benchmark.py --engine int8.engine --engine fp16.engine --shapes input:8x3x224x224 --useCudaGraph
    python scripts/benchmark.py --onnx model.onnx --shapes input:1x3x224x224 --batches 1,8,64 --plot sweep.png
    python scripts/benchmark.py --torch torchvision.models:resnet50 --shapes input:1x3x224x224 --compile --device cuda

On a GPU execution is timed with CUDA events, and again with the copies; on the CPU by the clock. ONNX Runtime runs on
the CPU: its speed on a Q/DQ file says little about TensorRT's.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _engines import add_engine_options, open_engine

from qat.errors import QatError, RunnerError
from qat.files import write_json
from qat.report import environment, format_table
from qat.runtime import OnnxRuntimeRunner, Runner, TorchRunner
from qat.runtime.data import random_inputs
from qat.runtime.latency import Latency, SweepPoint, measure_runner, plot_sweep, sweep_batches
from qat.runtime.runner import Arrays
from qat.runtime.torch import measure_torch
from qat.tensorrt import TensorRTRunner, measure_engine, parse_shapes
from qat.tensorrt.gpu_state import gpu_state
from qat.tensorrt.layer_profile import profile_layers

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
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


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from `1,2,4`."""
    return tuple(int(size) for size in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", "--loadEngine", action="append", default=[], metavar="FILE", help="TensorRT engine; repeatable")
    add("--onnx", action="append", default=[], metavar="FILE", help="ONNX file, for ONNX Runtime; repeatable")
    add("--torch", action="append", default=[], metavar="MODULE:CALLABLE", help="function that returns a torch model")
    add("--shapes", required=True, metavar="name:AxBxC,...", help="input shapes")
    add("--warmUp", type=int, default=20, metavar="RUNS", help="runs that do not count")
    add("--iterations", type=int, default=200, metavar="RUNS", help="runs that count")
    default = ",".join(map(str, DEFAULT_BATCHES))
    add("--batches", nargs="?", type=parse_sizes, const=DEFAULT_BATCHES, metavar="1,2,4", help=f"sweep: {default}")
    add("--useCudaGraph", action="store_true", help="TensorRT: also measure a CUDA graph")
    add("--infStreams", type=int, default=1, metavar="N", help="TensorRT: also measure N contexts at once")
    add("--dumpProfile", action="store_true", help="TensorRT: time of each layer")
    add_engine_options(parser)
    add("--device", default="cpu", help="torch: cpu or cuda")
    add("--compile", action="store_true", help="torch: measure torch.compile beside eager mode")
    add("--reference", action="store_true", help="ONNX Runtime: run the file literally instead of fast")
    add("--json", metavar="FILE", help="results with versions, clocks and hardware")
    add("--plot", metavar="FILE", help="PNG of the sweep")
    return parser


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


def make_torch(spec: str) -> Any:
    """The model of `package.module:function`.

    Raises:
        RunnerError: there is no such function, or it fails.
    """
    module, _, name = spec.partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise RunnerError(f"--torch {spec} cannot be made: {error}. Write package.module:function.") from error


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


PARTS = {
    "with copies ms": ("with_copies", "median_ms", ".3f"),
    "CUDA graph ms": ("cuda_graph", "median_ms", ".3f"),
    "streams samples/s": ("streams", "throughput", ".1f"),
}


def print_table(measured: Sequence[Subject]) -> None:
    """One row a model and batch; what could not be measured says why below."""
    details = [values for subject in measured for values in subject.details.values()]
    parts = {title: part for title, part in PARTS.items() if any(values.get(part[0]) for values in details)}
    rows, notes = [], []
    for subject in measured:
        for point in subject.points:
            r = point.latency
            numbers = [f"{v:.3f}" for v in (r.mean_ms, r.median_ms, r.p95_ms, r.p99_ms)] if r else ["-"] * 4
            found = subject.details.get(str(point.batch), {})
            more = [f"{found[key][value]:{how}}" if found.get(key) else "-" for key, value, how in parts.values()]
            rate = f"{r.throughput:.1f}" if r else "-"
            rows.append((subject.name, subject.backend, str(point.batch), *numbers, rate, *more))
            where = f"{subject.name} on {subject.backend}, batch {point.batch}"
            notes += [f"{where}: {note}" for note in (*filter(None, [point.reason]), *found.get("notes", []))]
    columns = ("model", "on", "batch", "mean ms", "median ms", "p95 ms", "p99 ms", "samples/s", *parts)
    print("\n".join([format_table("", columns, rows), *notes]))


def profile(subject: Subject, shapes: Shapes) -> None:
    """Measure and print the time of each layer, the slowest first."""
    assert isinstance(subject.runner, TensorRTRunner)
    times = profile_layers(subject.runner, random_inputs(shapes, subject.dtypes))
    slowest = sorted(times, key=lambda time: -time.mean_ms)
    rows = [(t.layer, f"{t.mean_ms:.4f}", f"{t.percent:.1f}") for t in slowest]
    print(format_table(f"layers of {subject.name}", ("layer", "mean ms", "%"), rows))
    subject.layers = [vars(t) for t in times]


def sweep(args: argparse.Namespace, subject: Subject, shapes: Shapes) -> None:
    """Measure every batch size asked for, or the shapes as they are."""

    def at(size: int) -> Latency:
        return measure(args, subject, {name: (size, *dims[1:]) for name, dims in shapes.items()})

    if args.batches:
        subject.points = sweep_batches(at, args.batches)
    else:
        latency = measure(args, subject, shapes)
        subject.points = [SweepPoint(latency.batch, latency)]


def run(args: argparse.Namespace) -> None:
    """Measure, print and write."""
    if not (args.engine or args.onnx or args.torch):
        raise RunnerError("Nothing to measure: give --engine, --onnx or --torch.")
    shapes = parse_shapes(args.shapes)
    measured = []
    for subject in subjects(args, shapes):
        sweep(args, subject, shapes)
        if args.dumpProfile and isinstance(subject.runner, TensorRTRunner):
            profile(subject, shapes)
        measured.append(subject)
    print_table(measured)
    if args.plot:
        plot_sweep(args.plot, {f"{s.name}, {s.backend}": s.points for s in measured})
    if args.json:
        write_json(args.json, {"environment": environment(), "models": [s.to_dict() for s in measured]})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 for an error."""
    try:
        run(make_parser().parse_args(argv))
    except (QatError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
