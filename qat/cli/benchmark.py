"""Measure models on TensorRT, ONNX Runtime and torch side by side, for one batch or a sweep of batch sizes.

    qat benchmark --engine int8.engine --engine fp16.engine --shapes input:8x3x224x224 --useCudaGraph
    qat benchmark --onnx model.onnx --shapes input:1x3x224x224 --batches 1,8,64 --plot sweep.png
    qat benchmark --torch torchvision.models:resnet50 --shapes input:1x3x224x224 --compile --device cuda

On a GPU execution is timed with CUDA events, and again with the copies; on the CPU by the clock. ONNX Runtime runs on
the CPU: its speed on a Q/DQ file says little about TensorRT's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from qat.cli.engine_options import add_engine_options
from qat.cli.subjects import Shapes, Subject, measure, subjects
from qat.errors import QatError, RunnerError
from qat.files import write_json
from qat.report import environment, format_table
from qat.runtime.data import random_inputs
from qat.runtime.latency import Latency, SweepPoint, plot_sweep, sweep_batches
from qat.tensorrt import TensorRTRunner, parse_shapes
from qat.tensorrt.layer_profile import profile_layers

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from `1,2,4`."""
    return tuple(int(size) for size in text.split(","))


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Exit status: 0, or 1 for an error."""
    try:
        run(make_parser(prog).parse_args(argv))
    except (QatError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
