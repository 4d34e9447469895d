"""What every quantizer sees: histogram, clipped share and noise of each tensor."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat.calib.histogram import HistogramCalibrator
from qat.calibration import Forward, run_batch, to_device
from qat.debug.codes import is_clipped, is_parameter, per_channel, unclamped_codes
from qat.errors import ConfigError
from qat.modes import evaluation_mode
from qat.quantizer import QuantizerState, TensorQuantizer, named_quantizers
from qat.sqnr import Sqnr
from qat.summary import summary

BINS = 128
"""Bars of a histogram; counted in 4,096 and merged."""


@dataclass(frozen=True)
class TensorStatistics:
    """The tensors that went through one quantizer.

    Attributes:
        name: the quantizer's module name.
        tensors: what it quantizes, in words.
        weight: True for parameters.
        channels: number of scales.
        amax: clipping point, the largest over the channels.
        largest: largest magnitude seen, in the unit of `counts`.
        clip: clipping point in the unit of `counts`.
        sqnr_db: of the quantized tensor, in dB.
        clipped: share of values outside the integer range, 0 to 1.
        counts: histogram of |x|, or of |x| / amax of the channel where there are several, from 0 up.
        width: width of a bin.
    """

    name: str
    tensors: tuple[str, ...]
    weight: bool
    channels: int
    amax: float
    largest: float
    clip: float
    sqnr_db: float
    clipped: float
    counts: tuple[int, ...]
    width: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TensorStatistics:
        """The inverse of `to_dict`."""
        return cls(**{**values, "tensors": tuple(values["tensors"]), "counts": tuple(values["counts"])})


class _Collector:
    """Forward hook of one quantizer."""

    def __init__(self) -> None:
        self.calibrator = HistogramCalibrator()
        self.sqnr = Sqnr()
        self.outside: Tensor | float = 0.0
        self.count = 0
        self.weight = False

    def __call__(self, quantizer: TensorQuantizer, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0].detach()
        self.weight = is_parameter(args[0])
        if quantizer.descriptor.axis is None:
            self.calibrator.collect(x)
        else:
            assert quantizer.amax is not None
            self.calibrator.collect(x.float() / per_channel(quantizer, quantizer.amax.detach(), x))
        self.sqnr.add(x, output)
        self.outside = self.outside + is_clipped(quantizer, unclamped_codes(quantizer, x)).sum()
        self.count += x.numel()

    def result(self, name: str, tensors: tuple[str, ...], quantizer: TensorQuantizer) -> TensorStatistics | None:
        found = self.calibrator.histogram()
        maximum = self.calibrator.compute_amax("max")
        if found is None or maximum is None or quantizer.amax is None:
            return None
        amax, largest = float(quantizer.amax.max()), float(maximum)
        clip = amax if quantizer.descriptor.axis is None else 1.0
        counts, width = _merged(*found, largest)
        channels = quantizer.amax.numel()
        share = float(self.outside) / max(self.count, 1)
        return TensorStatistics(
            name, tensors, self.weight, channels, amax, largest, clip, self.sqnr.db, share, counts, width
        )


def _merged(counts: Tensor, width: float, largest: float) -> tuple[tuple[int, ...], float]:
    """The histogram up to the largest value, in at most BINS bars."""
    used = min(int(largest / width) + 1, counts.numel())
    step = -(-used // BINS)
    padded = torch.zeros(-(-used // step) * step, dtype=counts.dtype)
    padded[:used] = counts[:used]
    return tuple(padded.reshape(-1, step).sum(1).tolist()), width * step


@torch.no_grad()
def tensor_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    num_batches: int | None = 4,
    forward: Forward = run_batch,
    progress: bool = True,
) -> tuple[TensorStatistics, ...]:
    """Statistics of every quantizer that quantizes, in the quantized model, in module order.

    Args:
        model: calibrated; left as it was. Under torchrun call this in all processes, whose counts are added.
        batches: tensors, (inputs, ...) sequences or keyword mappings; moved to the model's device.
        num_batches: how many to take, None for all.
        forward: how one batch is run.
        progress: show a bar.

    Raises:
        ConfigError: there are no batches.
        CalibrationError: a tensor holds NaN or Inf.
    """
    active = {n: q for n, q in named_quantizers(model) if q.state is QuantizerState.QUANTIZING}
    collectors = {name: _Collector() for name in active}
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    count = 0
    with evaluation_mode(model), ExitStack() as stack:
        for name, quantizer in active.items():
            hook: Any = collectors[name]
            stack.callback(quantizer.register_forward_hook(hook).remove)
        for batch in tqdm(
            islice(batches, num_batches), "statistics", total=num_batches, disable=not progress, leave=False
        ):
            forward(model, to_device(batch, device))
            count += 1
    if not count:
        raise ConfigError("there are no batches to look at. Check the data folder and the number of batches.")
    described = {row.name: row.tensors for row in summary(model).quantizers}
    results = (collectors[name].result(name, described[name], quantizer) for name, quantizer in active.items())
    return tuple(result for result in results if result is not None)
