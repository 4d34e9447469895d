#!/usr/bin/env python
"""Ways to compile a QAT step, beside the float step compiled in the same way: time, the GPU's own time, peak memory.

    python benchmarks/compiled_ways.py
    python benchmarks/compiled_ways.py --networks resnet50 --ways float ours
    python benchmarks/compiled_ways.py --quick --device cpu --networks bert --backend aot_eager --ways float ours

The steps of `benchmarks/qat_step.py`. Each network and way has a process of its own; all compile at once, which takes
minutes, then they wait for each other and take turns: a machine that is slower for a while is so for all of them.
"host ms" is until the step is handed to the GPU, "gpu ms" the time in which the GPU works. Peak memory is what torch
allocated; under CUDA graphs it has none to tell. Our target is 1.10 of the float step's time, 1.15 of its memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from qat.training.compiled import RECOMPUTED
from qat_step import built, clear, training_step
from qat_step_networks import NETWORKS
from timing import arguments, bars, gpu_ms, once_ms, peak_mib, report, show
from turns import Row, Turns, in_turns

ROUNDS, STEPS, WARMUP = 4, 12, 3


class Way(NamedTuple):
    """The network's variant, torch.compile's mode, and what AOTAutograd is told beside."""

    variant: str
    mode: str = "default"
    settings: Mapping[str, Any] = {}


WAYS = {
    "float": Way("float"),
    "ours": Way("ours"),
    "ours, masks saved": Way("ours", settings=dict.fromkeys(RECOMPUTED, True)),
    "float, CUDA graphs": Way("float", "reduce-overhead"),
    "ours, CUDA graphs": Way("ours", "reduce-overhead"),
}


def main(args: list[str]) -> int:
    """Compile all, let them take turns, write and print the rows."""
    parser = arguments(__doc__, "compiled_ways")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args(args)
    rows: list[Row] = [{"network": network, "way": way} for network in options.networks for way in options.ways]
    for row in in_turns(work, rows, options):
        print(f"{row['network']}, {row['way']}: {', '.join([*row][2:])}", flush=True)
        compare(rows)
        report(options, rows, backend=options.backend)
    show(
        "One compiled training step",
        ("network", "way", "ms", "x float", "host ms", "gpu ms", "x gpu", "x memory", "graph breaks"),
        rows,
    )
    panels = {n: {r["way"]: r["ms"] for r in rows if r["network"] == n and "ms" in r} for n in options.networks}
    bars(options.plot, panels, {}, "ms a step")
    return 0


def work(row: Row, turns: Turns, options: argparse.Namespace) -> None:
    """Compile one, wait for the others, time it in turns."""
    device = torch.device(options.device)
    step = compiled(row["network"], WAYS[row["way"]], options)
    for _ in range(WARMUP + 3):
        step()
    peak = None if "CUDA graphs" in row["way"] else peak_mib(step, device)
    counters = torch._dynamo.utils.counters
    clear(device)  # what compiling left in the allocator is for the others
    breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
    turns.wait({"peak MiB": peak, "graph breaks": breaks, "graphs": graphs})
    turns.send(timed_steps(step, device, turns, 1 if options.quick else ROUNDS))
    with turns.one():  # last, because profilers and CUDA graphs have been seen to hang together
        turns.send({"gpu ms": gpu_ms(step, device)})


def compiled(network: str, way: Way, options: argparse.Namespace) -> Any:
    """The training step, compiled by its first call."""
    device, net = torch.device(options.device), NETWORKS[network](options.quick)
    model, _ = built(way.variant, net, device)
    mode = way.mode if options.backend == "inductor" else None
    return training_step(
        model, net, device, lambda model: torch.compile(model, backend=options.backend, mode=mode), way.settings
    )


def timed_steps(step: Any, device: torch.device, turns: Turns, rounds: int) -> Row:
    """Rounds of steps, each while no other process has the GPU."""
    times: list[float] = []
    hosts: list[float] = []

    def timed() -> None:
        begin = time.perf_counter()
        step()
        hosts.append(1000 * (time.perf_counter() - begin))

    for _ in range(rounds):
        with turns.one():
            for _ in range(WARMUP):
                step()
            times += [once_ms(timed, device) for _ in range(STEPS)]
        time.sleep(0.3)  # for the others to get it
    low, middle, high = statistics.quantiles(times, n=4)
    row = {"ms": round(middle, 4), "quartiles_ms": [round(low, 4), round(high, 4)], "repeats": len(times)}
    return {**row, "host ms": round(statistics.median(hosts), 4)}


def compare(rows: list[Row]) -> None:
    """Ratios to the float step in the same mode of torch.compile."""
    base = {(r["network"], WAYS[r["way"]].mode): r for r in rows if WAYS[r["way"]].variant == "float"}
    for row in rows:
        other = base.get((row["network"], WAYS[row["way"]].mode), {})
        for key, ratio in (("ms", "x float"), ("gpu ms", "x gpu"), ("peak MiB", "x memory")):
            if other.get(key) and row.get(key):
                row[ratio] = round(row[key] / other[key], 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
