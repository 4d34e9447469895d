"""What the speed benchmarks share: timing, memory, a correctness gate, results with their environment, a picture."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from qat.errors import QatError
from qat.fake_quant import fake_quantize
from qat.files import write_json
from qat.report import environment, format_table
from qat.report.figures import GREY, new_figure, save_png

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 20
COLOURS = {"float": "#4c566a", "ours": "#5e81ac"}


def arguments(description: str | None, name: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few repeats: shows that it runs, no more")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / f"{name}.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / f"{name}.png")
    return parser


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alternating_ms(
    runs: Sequence[Callable[[], Any]], device: torch.device, repeats: int = REPEATS, warmup: int = 5
) -> list[dict[str, Any]]:
    """Time calls one by one and in turn, by CUDA events on a GPU: median and quartiles of each in milliseconds.

    A machine that is slower for a while is so for all of them.
    """
    for run in runs:
        for _ in range(warmup):
            run()
    synchronize(device)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, found in zip(runs, times, strict=True):
            found.append(once_ms(run, device))
    return [_median(found) for found in times]


def median_ms(run: Callable[[], Any], device: torch.device, repeats: int = REPEATS, warmup: int = 5) -> dict[str, Any]:
    """The same of one."""
    return alternating_ms([run], device, repeats, warmup)[0]


def once_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call, by CUDA events on a GPU."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - begin)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _median(times: Sequence[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else [*times] * 3
    return {"ms": round(middle, 4), "quartiles_ms": [round(low, 4), round(high, 4)], "repeats": len(times)}


def gpu_ms(run: Callable[[], Any], device: torch.device, repeats: int = 3) -> float | None:
    """Milliseconds of a call in which the GPU works, however long the host takes to tell it; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        synchronize(device)
    busy = sum(event.self_device_time_total for event in profiler.key_averages())
    return round(busy / repeats / 1000, 4)


def peak_mib(run: Callable[[], Any], device: torch.device) -> float | None:
    """Most memory that torch had allocated on the GPU during a call; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast, as the steps are timed."""
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()


def exact_codes(x: Tensor, amax: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Codes before they are clamped, and the scale, in float64 on the CPU; rounded where the operator rounds."""
    scale = (amax.cpu().double() / 127).float().clamp_min(2.0**-24).double()
    scale = scale if axis is None else scale.reshape([-1 if d == axis else 1 for d in range(x.dim())])
    return (x.detach().cpu().double() / scale).float().double().round(), scale


def check_fake_quantize(device: torch.device, quantize: Callable[..., Tensor] = fake_quantize) -> int:
    """Compare forward and gradient with float64 on random values and ties, before anything is timed.

    Returns:
        How many values were compared.

    Raises:
        QatError: they differ.
    """
    count = 0
    dtypes, shapes = (torch.float32, torch.bfloat16, torch.float16), ((3, 16, 9, 7), (2, 8, 33, 5))
    for dtype, shape, (axis, low) in product(dtypes, shapes, ((None, -128), (0, -127), (1, -127))):
        x = torch.randn(shape) * 2
        ties = x.view(-1)[::3].numel()
        x.view(-1)[::3] = (torch.arange(ties) % 300 - 150) * 0.5 * (3.0 / 127)
        x = x.to(device, dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        amax = torch.tensor(3.0) if axis is None else torch.rand(shape[axis]) * 3 + 0.1
        grad = torch.randn(shape).to(dtype)
        y = quantize(x, amax.to(device), axis, low, 127)
        y.backward(grad.to(device))
        codes, scale = exact_codes(x, amax, axis)
        want = (codes.clamp(low, 127) * scale).float().to(dtype)
        want_grad = torch.where((codes >= low) & (codes <= 127), grad, 0)
        assert x.grad is not None
        if not (torch.equal(y.detach().cpu(), want) and torch.equal(x.grad.cpu(), want_grad)):
            raise QatError(f"fake quantization of {dtype}, axis {axis}, differs from float64. Nothing is timed.")
        count += x.numel()
    return count


def report(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Write the rows with what produced them, and return the whole."""
    whole = {"environment": environment(), "device": options.device, "quick": options.quick, **more, "rows": [*rows]}
    write_json(options.results, whole)
    return whole


def show(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows' columns; a row that has `missing` says there why it has no numbers."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows if "missing" not in row]
    print(format_table(title, columns, cells))
    for row in rows:
        if "missing" in row:
            print(f"{' '.join(str(row.get(column, '')) for column in columns[:3])}: {row['missing']}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bars(path: Path, panels: Mapping[str, Mapping[str, float]], limits: Mapping[str, float], unit: str) -> None:
    """One panel of horizontal bars for each title; a line at its limit where it has one."""
    figure = new_figure(11, 2.6 + 2.4 * ((len(panels) - 1) // 3))
    columns = min(len(panels), 3)
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
    for axes, (title, values) in zip(grid, panels.items(), strict=False):
        names = list(values)
        colours = [next((c for key, c in COLOURS.items() if name.startswith(key)), GREY) for name in names]
        axes.bar_label(axes.barh(names, list(values.values()), color=colours), fmt="%.3g", fontsize=7)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(unit, fontsize=8)
        axes.tick_params(labelsize=7)
        if title in limits:
            axes.axvline(limits[title], color="#bf616a", linestyle="--", linewidth=1)
    for axes in list(grid):
        axes.set_visible(False)
    save_png(figure, path)
