#!/usr/bin/env python
"""Histogram calibration of ResNet-50: collecting against the float forward, then the searches over all layers.

    python benchmarks/calibration.py                           # on a GPU: 16 batches of 64 at 224 px
    OMP_NUM_THREADS=2 python benchmarks/calibration.py --device cpu    # 2 batches of 8
    python benchmarks/calibration.py --quick --device cpu      # a ResNet-18 at 64 px

Every input and weight of a convolution or linear layer and every residual add has a quantizer; each activation's
histogram has 4096 bins. Collecting is all of `qat.collect_stats`, forward included; the batches are on the device.
A histogram on the device is compared with one counted in float64 by NumPy, and each method's choice with that of plain
loops over the same histogram, before anything is timed. Targets: collecting at most 2x the float forward; entropy, MSE
and percentile of all layers together under 1 s on a GPU and under 15 s on 2 CPU cores.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import qat
import textbook
from qat.calib import HistogramCalibrator
from qat.calibration import collect_stats, compute_amax, use_histograms
from qat.errors import QatError
from qat.quantizer import named_quantizers
from qat_step_variants import ALL_RULES
from timing import arguments, autocast, bars, median_ms, report, show, synchronize

COLLECT_TARGET = 2.0
SEARCH_TARGETS = {"cuda": 1.0, "cpu": 15.0}
METHODS = ("entropy", "mse", "percentile")


def main(args: list[str]) -> int:
    """Exit status 0 where the targets of the device are met."""
    parser = arguments(__doc__, "calibration")
    parser.add_argument("--batches", type=int, help="default 16 on a GPU, 2 on a CPU")
    parser.add_argument("--batch-size", type=int, help="default 64 on a GPU, 8 on a CPU")
    options = parser.parse_args(args)
    device = torch.device(options.device)
    print(f"{check(device)} choices equal the textbook's")
    count, size, pixels, repeats = (16, 64, 224, 5) if device.type == "cuda" else (2, 8, 224, 1)
    if options.quick:
        count, size, pixels, repeats = 2, 2, 64, 1
    count, size = options.batches or count, options.batch_size or size
    model, batches = build("resnet18" if options.quick else "resnet50", device, count, size, pixels)
    rows = [*collecting(model, batches, device, repeats), *searching(model, device)]
    columns = ("what", "seconds", "x float", "target", "quantizers")
    show(f"Calibration, {count} batches of {size}", columns, rows)
    report(options, rows, batches=count, batch_size=size, pixels=pixels, threads=torch.get_num_threads())
    bars(options.plot, {"seconds": {row["what"]: row["seconds"] for row in rows}}, {}, "seconds")
    met = [row["x float" if "x float" in row else "seconds"] <= row["target"] for row in rows if "target" in row]
    return 0 if all(met) or (device.type == "cpu" and met[-1]) else 1


def build(name: str, device: torch.device, count: int, size: int, pixels: int) -> tuple[nn.Module, list[Tensor]]:
    """The prepared network with its BatchNorm statistics, and batches, on the device."""
    from torchvision.models import get_model

    torch.manual_seed(0)
    model = get_model(name).to(device, memory_format=torch.channels_last)
    batches = [torch.randn(size, 3, pixels, pixels).to(device, memory_format=torch.channels_last) for _ in range(count)]
    with torch.no_grad():
        model.train()(batches[0])
    qat.prepare(model.eval(), batches[0], rules=ALL_RULES, keep_float_logits=False)
    use_histograms(model)
    return model, batches


def collecting(model: nn.Module, batches: list[Tensor], device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Float forward and collecting, in bf16 autocast on a GPU and in float32."""
    quantizers = [quantizer for _, quantizer in named_quantizers(model)]
    rows = []
    for name in ("bf16", "float32") if device.type == "cuda" else ("float32",):

        def forward(module: nn.Module, batch: Tensor, name: str = name) -> Any:
            with autocast(device) if name == "bf16" else torch.autocast(device.type, enabled=False):
                return module(batch)

        @torch.no_grad()
        def float_forward(forward: Any = forward) -> None:
            for batch in batches:
                forward(model, batch)

        for quantizer in quantizers:
            quantizer.set_state(qat.QuantizerState.PASSTHROUGH)
        floating = median_ms(float_forward, device, repeats, warmup=1)["ms"] / 1000
        for quantizer in quantizers:
            quantizer.set_state(qat.QuantizerState.QUANTIZING)
        collect = lambda forward=forward: collect_stats(model, batches, forward=forward, progress=False)  # noqa: E731
        collected = median_ms(collect, device, repeats, warmup=1)["ms"] / 1000
        rows.append({"what": f"float forward, {name}", "seconds": round(floating, 4)})
        ratio = round(collected / floating, 4)
        row = {"what": f"collecting, {name}", "seconds": round(collected, 4), "x float": ratio}
        rows.append({**row, "target": COLLECT_TARGET, "quantizers": len(quantizers)})
    return rows


def searching(model: nn.Module, device: torch.device) -> list[dict[str, Any]]:
    """Computing every amax by each method, and the sum; the first search on a GPU is for its warm-up."""
    if device.type == "cuda":
        compute_amax(model, "entropy")
    rows, total = [], 0.0
    for method in METHODS:
        synchronize(device)
        begin = time.perf_counter()
        found = compute_amax(model, method)
        synchronize(device)
        taken = time.perf_counter() - begin
        total += taken
        rows.append({"what": f"search: {method}", "seconds": round(taken, 4), "quantizers": found.quantizers})
    return [*rows, {"what": "searches together", "seconds": round(total, 4), "target": SEARCH_TARGETS[device.type]}]


def check(device: torch.device) -> int:
    """Compare counts with NumPy's in float64 and choices with plain loops.

    Returns:
        How many choices were compared.

    Raises:
        QatError: they differ.
    """
    count = 0
    for seed, shape in enumerate(("normal", "relu", "long tail")):
        generator = np.random.default_rng(seed)
        x = generator.normal(size=20_000).astype(np.float32)
        x = np.maximum(x, 0) if shape == "relu" else np.exp(1.5 * x) if shape == "long tail" else x
        calibrator = HistogramCalibrator(num_bins=512)
        calibrator.collect(torch.from_numpy(x).to(device))
        merged = calibrator.histogram()
        assert merged is not None
        counts, width = merged[0].numpy(), merged[1]
        wanted = np.histogram(np.abs(x).astype(np.float64), 512, (0, 512 * width))[0]
        if not np.array_equal(counts, wanted):
            raise QatError(f"the histogram of {shape} values differs from NumPy's. Nothing is timed.")
        largest = float(np.abs(x).max())
        used = counts[: int(largest / width) + 1].astype(np.float64)
        cumulative = used.cumsum()
        bins = {
            "entropy": textbook.entropy(used, 128),
            "mse": textbook.mse(used, 127),
            "percentile": int((cumulative < 0.9999 * cumulative[-1]).sum()) + 1,
        }
        for method, edge in bins.items():
            amax = calibrator.compute_amax(method)
            if amax is None or float(amax) != min(np.float32(largest), np.float32(edge * width)):
                raise QatError(f"{method} on {shape} values chose {amax}, plain loops bin {edge}. Nothing is timed.")
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
