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
import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from qat.training.compiled import RECOMPUTED
from qat_step import built, training_step
from qat_step_networks import NETWORKS
from timing import arguments, bars, gpu_ms, once_ms, peak_mib, report, show

ROUNDS, STEPS, WARMUP = 4, 12, 3
LONGEST = 1800
"""Seconds in which a process compiles and is timed, or has died."""


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
    context = multiprocessing.get_context("spawn")
    todo = [(network, way) for network in options.networks for way in options.ways]
    together = context.Barrier(len(todo)), context.Lock(), context.Queue()
    for one in todo:
        context.Process(target=work, args=(*one, options, *together), daemon=True).start()
    found = {(row["network"], row["way"]): row for row in (together[2].get(timeout=LONGEST) for _ in todo)}
    rows = [found[one] for one in todo]
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


def work(network: str, way: str, options: argparse.Namespace, barrier: Any, lock: Any, rows: Any) -> None:
    """Compile one, wait for the others, time it in turns; one that fails says why and does not hold up the others."""
    row: dict[str, Any] = {"network": network, "way": way}
    try:
        step = compiled(network, WAYS[way], options)
        device = torch.device(options.device)
        for _ in range(WARMUP + 3):
            step()
        if "CUDA graphs" not in way:
            row["peak MiB"] = peak_mib(step, device)
        counters = torch._dynamo.utils.counters
        row |= {"graph breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]}
    except Exception as error:  # whatever compilers raise
        row["missing"] = f"{type(error).__name__}: {str(error)[:200]}"
    barrier.wait(LONGEST)
    if "missing" not in row:
        row |= in_turns(step, device, lock, 1 if options.quick else ROUNDS)
    rows.put(row)


def compiled(network: str, way: Way, options: argparse.Namespace) -> Any:
    """The training step, compiled by its first call."""
    device, net = torch.device(options.device), NETWORKS[network](options.quick)
    model, _ = built(way.variant, net, device)
    mode = way.mode if options.backend == "inductor" else None
    return training_step(
        model, net, device, lambda model: torch.compile(model, backend=options.backend, mode=mode), way.settings
    )


def in_turns(step: Any, device: torch.device, lock: Any, rounds: int) -> dict[str, Any]:
    """Rounds of steps, each while no other process has the lock."""
    times: list[float] = []
    hosts: list[float] = []

    def timed() -> None:
        begin = time.perf_counter()
        step()
        hosts.append(1000 * (time.perf_counter() - begin))

    for _ in range(rounds):
        with lock:
            for _ in range(WARMUP):
                step()
            times += [once_ms(timed, device) for _ in range(STEPS)]
        time.sleep(0.3)  # for the others to get it
    with lock:
        busy = gpu_ms(step, device)
    low, middle, high = statistics.quantiles(times, n=4)
    row = {"ms": round(middle, 4), "quartiles_ms": [round(low, 4), round(high, 4)], "repeats": len(times)}
    return {**row, "host ms": round(statistics.median(hosts), 4), "gpu ms": busy}


def compare(rows: list[dict[str, Any]]) -> None:
    """Ratios to the float step in the same mode of torch.compile."""
    base = {(r["network"], WAYS[r["way"]].mode): r for r in rows if WAYS[r["way"]].variant == "float"}
    for row in rows:
        other = base.get((row["network"], WAYS[row["way"]].mode), {})
        for key, ratio in (("ms", "x float"), ("gpu ms", "x gpu"), ("peak MiB", "x memory")):
            if other.get(key) and row.get(key):
                row[ratio] = round(row[key] / other[key], 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
