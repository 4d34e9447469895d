#!/usr/bin/env python
"""Bandwidth of the fake-quantize kernels against that of a copy on the same device.

    python benchmarks/fake_quant_kernels.py                 # 1 Ki to 256 Mi elements
    python benchmarks/fake_quant_kernels.py --quick --device cpu

For each size: forward (read x, write y and one bit an element), backward from the bits (read the gradient and the bits,
write), backward from x, the learned scale's backward, and forward with one scale a channel in channels_last. Times are
medians of 20; on a GPU the launches are replayed from a CUDA graph, over several buffers where one would fit in the
cache, so that launch overhead and cache hits stay out; `call_us` is the host time of one eager call. A row's bandwidth
counts the bytes that the kernel must move; its share is of the copy's of the same size. Target: at least 85 % above
16 Mi elements. `--tune` times other block sizes. Fake quantization is compared with float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from qat.fake_quant import fake_quantize
from qat.report.figures import new_figure, save_png
from timing import arguments, check_fake_quantize, median_ms, report, show, synchronize

SIZES = [2**power for power in range(10, 29)]
CACHE_BYTES = 2**28
"""Buffers are rotated until a round touches as much: several times an H200's L2."""
LARGE, TARGET = 2**24, 0.85
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Call = Callable[[Tensor], Any]


def main(args: list[str]) -> int:
    """Exit status 0 where the target is met, or on a CPU, which has none."""
    parser = arguments(__doc__, "fake_quant_kernels")
    parser.add_argument("--tune", action="store_true", help="time block sizes and warps at the largest size, and stop")
    options = parser.parse_args(args)
    device = torch.device(options.device)
    print(f"{check_fake_quantize(device)} values equal float64's")
    if options.tune:
        return tune(options, device)
    sizes = SIZES[:6:5] if options.quick else SIZES
    rows: list[dict[str, Any]] = []
    for name, size in tqdm([*product(DTYPES, sizes)], unit="size"):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows += measure(name, size, device, options.quick)
    show("Fake-quantize kernels", ("kernel", "type", "elements", "ms", "GB/s", "of copy", "call_us"), rows)
    large = [r["of copy"] for r in rows if r["elements"] >= LARGE and r["kernel"] in ("forward", "backward")]
    met = bool(large) and min(large) >= TARGET
    report(options, rows, target=TARGET, met=met if large else None)
    plot(options, rows)
    print(f"least share of the copy's bandwidth from 16 Mi elements on: {min(large):.3f}" if large else "no large size")
    return 0 if met or device.type == "cpu" else 1


def kernels(x: Tensor) -> Iterator[tuple[str, float, Call]]:
    """Name, bytes moved an element, and a call for each kernel, for tensors like x, (N, 64, 1, W) channels_last."""
    width = x.element_size()
    amax, channels = torch.tensor(3.0, device=x.device), torch.rand(x.shape[1], device=x.device) + 2
    grad = torch.randn_like(x)
    yield "copy", 2 * width, lambda t: t.clone()
    if not x.is_cuda:
        yield "forward", 2 * width, lambda t: fake_quantize(t, amax)
        yield "forward, per channel", 2 * width, lambda t: fake_quantize(t, channels, 1)
        return
    from qat import fake_quant_triton as triton_kernels

    bits = triton_kernels.forward(x, amax, None, -128, 127, triton_kernels.WITHIN)[1]
    assert bits is not None
    rest = (amax, None, -128, 127)
    yield "forward", 2 * width + 1 / 8, lambda t: triton_kernels.forward(t, *rest, triton_kernels.WITHIN)
    yield "forward, no gradient", 2 * width, lambda t: triton_kernels.forward(t, *rest)
    yield (
        "forward, ReLU packed",
        2 * width + 2 / 8,
        lambda t: triton_kernels.forward(t, *rest, triton_kernels.AND_POSITIVE),
    )
    yield "forward, per channel", 2 * width, lambda t: triton_kernels.forward(t, channels, 1, -127, 127)
    yield "backward", 2 * width + 1 / 8, lambda t: triton_kernels.select(t, bits, x.stride())
    yield "backward, from x", 3 * width, lambda t: triton_kernels.backward(grad, t, *rest)
    yield "backward, learned", 3 * width, lambda t: triton_kernels.backward(grad, t, *rest, True)


def measure(name: str, size: int, device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """A row for each kernel at this size and type."""

    def make() -> Tensor:
        values = torch.randn(size // 256, 64, 1, 4, device=device).to(DTYPES[name])
        return values.contiguous(memory_format=torch.channels_last)

    x = make()
    rotated = 1 if device.type == "cpu" else max(1, min(64, CACHE_BYTES // (size * x.element_size())))
    buffers = [x, *(make() for _ in range(rotated - 1))]
    rows: list[dict[str, Any]] = []
    for kernel, width, call in kernels(x):
        found = replayed(call, buffers, device) if device.type == "cuda" else {}
        ms = found.get("ms") or median_ms(lambda call=call: call(x), device, 3 if quick else 20)["ms"]
        rate = size * width / max(ms, 1e-6) / 1e6
        row = {"kernel": kernel, "type": name, "elements": size, "ms": ms, "GB/s": round(rate, 1), **found}
        row["of copy"] = round(rate / rows[0]["GB/s"], 4) if rows else 1.0
        rows.append({**row, "call_us": host_us(call, x, device)})
    return rows


def replayed(call: Call, buffers: list[Tensor], device: torch.device) -> dict[str, Any]:
    """Median milliseconds of one call, from replays of a CUDA graph that calls it on each buffer."""
    call(buffers[0])
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for buffer in buffers:
            call(buffer)
    timed = median_ms(graph.replay, device)
    return {"ms": timed["ms"] / len(buffers), "quartiles_ms": [q / len(buffers) for q in timed["quartiles_ms"]]}


def host_us(call: Call, x: Tensor, device: torch.device, calls: int = 20) -> float:
    """Host time of one eager call, microseconds; the device may lag behind."""
    call(x)
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call(x)
    taken = time.perf_counter() - begin
    synchronize(device)
    return round(1e6 * taken / calls, 2)


def tune(options: argparse.Namespace, device: torch.device) -> int:
    """Share of the copy's bandwidth for block sizes and warps; the best are to be written into the module."""
    from qat import fake_quant_triton as triton_kernels

    rows = []
    for block, warps in product((128, 256, 512, 1024), (4, 8, 16)):
        triton_kernels.ROWS, triton_kernels.WARPS = block, warps
        for row in measure("bf16", 2**14 if options.quick else 2**26, device, options.quick):
            rows.append({"rows": block, "warps": warps, **row})
    show("Block sizes, bf16, 64 Mi elements", ("rows", "warps", "kernel", "ms", "of copy"), rows)
    return 0


def plot(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Bandwidth over size for each kernel."""
    figure = new_figure(11, 4)
    for axes, name in zip(figure.subplots(1, len(DTYPES)), DTYPES, strict=True):
        for kernel in dict.fromkeys(row["kernel"] for row in rows):
            found = [row for row in rows if row["kernel"] == kernel and row["type"] == name]
            style = {"color": "#4c566a", "linestyle": "--"} if kernel == "copy" else {}
            axes.plot([r["elements"] for r in found], [r["GB/s"] for r in found], label=kernel, **style)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("elements")
        axes.set_ylabel("GB/s")
        axes.set_title(name)
        axes.legend(fontsize=7)
    save_png(figure, options.plot)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
