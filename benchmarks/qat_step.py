#!/usr/bin/env python
"""A QAT step against a float step: time and peak memory, ours beside torch's operator and two other toolkits.

    python benchmarks/qat_step.py
    python benchmarks/qat_step.py --networks resnet50 --variants float ours
    python benchmarks/qat_step.py --quick --device cpu --networks bert

ResNet-50 and EfficientNet-B0 (batch 128, 224 px, channels_last) and a BERT-base-sized encoder (12 layers, sequence 384,
batch 32): forward and backward in bf16 autocast, SGD step; every convolution's and linear layer's input and weight
quantized, residual adds too (`ours`). Steps take turns with steps of the float network in the same process, and each
row has its own float time. Medians of 20 by CUDA events; "gpu ms" is the part of it in which the GPU works, from its
profiler; peak memory as torch allocated it. Steps are eager; `benchmarks/compiled_ways.py` compiles them. A toolkit
that cannot be imported or refuses gets a row that says so. Fake quantization is compared with float64 before anything
is timed. Rows of the same commit and GPU in the results file stay, so a network a call is possible.

Targets, over float: 1.15 in time (BERT 1.20), 1.15 in peak memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from tqdm import tqdm

from qat.training import recomputed_masks
from qat_step_networks import NETWORKS, Network
from qat_step_variants import VARIANTS
from timing import (
    REPEATS,
    alternating_ms,
    arguments,
    autocast,
    bars,
    check_fake_quantize,
    gpu_ms,
    peak_mib,
    report,
    show,
)

TARGETS = {"time": 1.15, "bert": 1.20, "memory": 1.15}


def main(args: list[str]) -> int:
    """Exit status 0 where our steps meet the targets, or on a CPU."""
    parser = arguments(__doc__, "qat_step")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    options = parser.parse_args(args)
    device = torch.device(options.device)
    print(f"{check_fake_quantize(device)} values equal float64's")
    rows = earlier_rows(options)
    todo = [(network, variant) for network in options.networks for variant in options.variants]
    for network, variant in (bar := tqdm(todo, unit="row")):
        bar.set_postfix_str(f"{network} {variant}")
        rows[network, variant] = measure(network, variant, options, device)
        compare(rows)
        report(options, [*rows.values()], targets=TARGETS)
    columns = ("network", "variant", "ms", "x float", "x gpu", "peak MiB", "x memory", "quantizers")
    show("One training step", columns, [*rows.values()])
    plot(options, [*rows.values()])
    return 0 if device.type == "cpu" or all(met(row) for row in rows.values() if row["variant"] == "ours") else 1


def earlier_rows(options: argparse.Namespace) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows there are from the same commit, hardware and settings."""
    from qat.report import environment

    if not options.results.exists():
        return {}
    before, now = json.loads(options.results.read_text()), environment()
    same = all(before["environment"][key] == now[key] for key in ("commit", "gpu", "cpu", "packages"))
    same = same and all(before.get(key) == getattr(options, key) for key in ("quick", "device"))
    return {(r["network"], r["variant"]): r for r in before["rows"]} if same else {}


def measure(name: str, variant: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time and peak memory of one training step; `missing` where the variant cannot be had."""
    row: dict[str, Any] = {"network": name, "variant": variant}
    network = NETWORKS[name](options.quick)
    clear(device)
    try:
        model, quantizers = built(variant, network, device)
    except Exception as error:  # other toolkits raise whatever they like
        first = (str(error).strip().splitlines() or [""])[0]
        return {**row, "missing": f"{type(error).__name__}: {first[:200]}"}
    step = training_step(model, network, device)
    repeats, warmup = (3, 1) if options.quick else (REPEATS, 8)
    for _ in range(warmup):
        step()
    row |= {"peak MiB": peak_mib(step, device), "quantizers": quantizers}
    steps = [step]
    if variant != "float":
        base, _ = built("float", network, device)
        steps.append(training_step(base, network, device))
    timed = alternating_ms(steps, device, repeats, warmup)
    row |= {**timed[0], "float ms": timed[-1]["ms"], "gpu ms": gpu_ms(step, device)}
    row["x float"] = round(row["ms"] / row["float ms"], 4)
    del model, step, steps
    clear(device)
    return row


def built(variant: str, network: Network, device: torch.device) -> tuple[nn.Module, int]:
    """A variant from the same random weights as every other."""
    torch.manual_seed(0)
    return VARIANTS[variant](network, device)


def clear(device: torch.device) -> None:
    """Free the cached memory of the variant before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def training_step(
    model: nn.Module,
    network: Network,
    device: torch.device,
    compiler: Callable[[nn.Module], Any] = lambda model: model,
    settings: Mapping[str, Any] | None = None,
) -> Callable[[], Tensor]:
    """Forward, backward and SGD on one batch that stays on the device; eager without a compiler.

    `settings` are AOTAutograd's, over those of `qat.training`.
    """
    model.train()
    x, target = (t.to(device) for t in network.batch())
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    run = compiler(model)

    def step() -> Tensor:
        with autocast(device):
            loss = network.loss(run(x), target)
        with torch.autograd.set_multithreading_enabled(False):  # as `qat.training` does, for float steps too
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    with recomputed_masks(model), torch._functorch.config.patch(**settings or {}):
        first = step()
    if not bool(torch.isfinite(first)):
        raise RuntimeError(f"the first loss is {first.item()}")
    return step


def compare(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Fill in the ratios of what does not depend on the moment to the float row of the same network."""
    for (network, _), row in rows.items():
        base = rows.get((network, "float"), {})
        for key, ratio in (("gpu ms", "x gpu"), ("peak MiB", "x memory")):
            if base.get(key) and row.get(key):
                row[ratio] = round(row[key] / base[key], 4)


def met(row: dict[str, Any]) -> bool:
    """Time and memory within the targets."""
    target = TARGETS.get(row["network"], TARGETS["time"])
    return row.get("x float", 9.9) <= target and row.get("x memory", 9.9) <= TARGETS["memory"]


def plot(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Milliseconds a step, one panel for each network."""
    panels: dict[str, dict[str, float]] = {}
    for row in rows:
        if "ms" in row:
            panels.setdefault(row["network"], {})[row["variant"]] = row["ms"]
    bars(options.plot, panels, {}, "ms a step")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
