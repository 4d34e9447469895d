#!/usr/bin/env python
"""Measure one model on TensorRT, ONNX Runtime or torch, for one batch or a sweep of batch sizes.

    python scripts/benchmark.py --engine model.engine --shapes input:8x3x224x224 --useCudaGraph --infStreams 2
    python scripts/benchmark.py --onnx model.onnx --shapes input:1x3x224x224 --batches 1,8,64 --plot sweep.png
    python scripts/benchmark.py --torch torchvision.models:resnet50 --shapes input:1x3x224x224 --compile

TensorRT is timed with CUDA events, with and without copies; the others by the clock, copies included. ONNX Runtime runs
on the CPU: its speed on a Q/DQ file says little about TensorRT's.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from qat.errors import QatError, RunnerError
from qat.files import write_json
from qat.report import environment, format_table
from qat.runtime import OnnxRuntimeRunner, Runner, TorchRunner
from qat.runtime.data import load_test_sets, random_inputs, verify
from qat.runtime.latency import Latency, SweepPoint, measure_runner, plot_sweep, sweep_batches
from qat.tensorrt import TensorRTRunner, load_library, measure_engine, parse_shapes
from qat.tensorrt.gpu_state import gpu_state
from qat.tensorrt.layer_profile import profile_layers

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Measure = Callable[[dict[str, tuple[int, ...]]], Latency]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from `1,2,4`."""
    return tuple(int(size) for size in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--engine", "--loadEngine", metavar="FILE", help="TensorRT engine")
    model.add_argument("--onnx", metavar="FILE", help="ONNX file, for ONNX Runtime on the CPU")
    model.add_argument("--torch", metavar="MODULE:CALLABLE", help="function that returns a torch model")
    add = parser.add_argument
    add("--shapes", required=True, metavar="name:AxBxC,...", help="input shapes")
    add("--warmUp", type=int, default=20, metavar="RUNS", help="runs that do not count")
    add("--iterations", type=int, default=200, metavar="RUNS", help="runs that count")
    default = ",".join(map(str, DEFAULT_BATCHES))
    add("--batches", nargs="?", type=parse_sizes, const=DEFAULT_BATCHES, metavar="1,2,4", help=f"sweep: {default}")
    add("--library", choices=("tensorrt", "tensorrt_rtx"), help="default: the first installed")
    add("--useCudaGraph", action="store_true", help="TensorRT: also measure a CUDA graph")
    add("--infStreams", type=int, default=1, metavar="N", help="TensorRT: also measure N contexts at once")
    add("--dumpProfile", action="store_true", help="TensorRT: time of each layer")
    add("--device", default="cpu", help="torch: cpu or cuda")
    add("--compile", action="store_true", help="torch: torch.compile")
    add("--reference", action="store_true", help="ONNX Runtime: run the file literally instead of fast")
    add("--verify", metavar="FOLDER", help="run test_data_set_*/input_0.pb and compare with output_0.pb")
    add("--json", metavar="FILE", help="results with versions, clocks and hardware")
    add("--plot", metavar="FILE", help="PNG of the sweep")
    return parser


def make_runner(args: argparse.Namespace, shapes: dict[str, tuple[int, ...]]) -> tuple[Runner, dict[str, str]]:
    """The runner, and the NumPy type of each input."""
    if args.torch:
        module, _, name = args.torch.partition(":")
        try:
            model = getattr(importlib.import_module(module), name)()
        except (ImportError, AttributeError, ValueError) as error:
            raise RunnerError(
                f"--torch {args.torch} cannot be made: {error}. Write package.module:function."
            ) from error
        return TorchRunner(model, list(shapes), ["output"], args.device, args.compile), dict.fromkeys(shapes, "float32")
    if args.onnx:
        fast = OnnxRuntimeRunner(args.onnx, reference=args.reference)
        return fast, {spec.name: spec.dtype for spec in fast.inputs}
    runner = TensorRTRunner(args.engine, load_library(args.library))
    return runner, {spec.name: spec.dtype for spec in runner.inputs}


def measure(args: argparse.Namespace, runner: Runner, dtypes: dict[str, str], extra: dict[str, Any]) -> Measure:
    """How to measure one set of shapes; details beyond the headline latency go into `extra`, by batch."""

    def one(shapes: dict[str, tuple[int, ...]]) -> Latency:
        if unknown := set(shapes) - set(dtypes):
            raise RunnerError(f"--shapes names {sorted(unknown)}; the model's inputs are {list(dtypes)}.")
        inputs = random_inputs(shapes, dtypes)
        if not isinstance(runner, TensorRTRunner):
            return measure_runner(runner, inputs, args.warmUp, args.iterations)
        timing = measure_engine(runner.loaded, inputs, args.warmUp, args.iterations, args.useCudaGraph, args.infStreams)
        extra[str(timing.execution.batch)] = timing.to_dict()
        return timing.execution

    return one


def print_points(title: str, points: Sequence[SweepPoint]) -> None:
    """A table of a sweep; a batch that cannot run says why."""
    rows = []
    for point in points:
        r = point.latency
        numbers = [f"{v:.3f}" for v in (r.mean_ms, r.median_ms, r.p95_ms, r.p99_ms)] if r else ["-"] * 4
        rows.append((str(point.batch), *numbers, f"{r.throughput:.1f}" if r else "-", point.reason))
    columns = ("batch", "mean ms", "median ms", "p95 ms", "p99 ms", "samples/s", "why not")
    print(format_table(title, columns, rows))


def run(args: argparse.Namespace) -> None:
    """Measure, print and write."""
    shapes = parse_shapes(args.shapes)
    runner, dtypes = make_runner(args, shapes)
    results: dict[str, Any] = {"details": {}}
    one = measure(args, runner, dtypes, results["details"])
    if args.batches:
        points = sweep_batches(lambda size: one({n: (size, *s[1:]) for n, s in shapes.items()}), args.batches)
    else:
        latency = one(shapes)
        points = [SweepPoint(latency.batch, latency)]
    model = args.engine or args.onnx or args.torch
    print_points(model, points)
    if args.dumpProfile and isinstance(runner, TensorRTRunner):
        times = profile_layers(runner, random_inputs(shapes, dtypes))
        rows = [(t.layer, f"{t.mean_ms:.4f}", f"{t.percent:.1f}") for t in times]
        print(format_table("layers", ("layer", "mean ms", "%"), rows))
        results["layers"] = [vars(t) for t in times]
    results["sweep"] = [vars(p) | {"latency": p.latency.to_dict() if p.latency else None} for p in points]
    if args.plot:
        plot_sweep(args.plot, {model: points}, model)
    if args.json:
        write_json(args.json, {"model": model, "environment": environment(), "gpu_state": gpu_state()} | results)
    if args.verify:
        found = verify(runner, load_test_sets(args.verify, runner.input_names, runner.output_names))
        wrong = [f"{name}: {problem}" for name, problems in found.items() for problem in problems]
        if wrong:
            raise RunnerError("Outputs differ from the test data:\n" + "\n".join(wrong))
        print(f"{len(found)} test data sets agree")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 for an error or a failed --verify."""
    try:
        run(make_parser().parse_args(argv))
    except (QatError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
