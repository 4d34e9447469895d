"""Quantizers that round a whole tensor to zero: behind them nothing can be learned."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qat.quantizer import TensorQuantizer, named_quantizers
from qat.states import QuantizerState

logger = logging.getLogger("qat")
SHOWN = 5


@contextmanager
def silence_is_said(model: nn.Module) -> Iterator[None]:
    """Surround a forward pass with this; a warning names quantizers that made zeros of all they were given.

    An outlier among the calibration data can give an activation an amax thousands of times its usual values. Training
    then runs, at chance: the gradient of every weight behind it is zero.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    quantizers = [(n, q) for n, q in named_quantizers(model) if q.state is QuantizerState.QUANTIZING]
    hooks = [quantizer.register_forward_hook(partial(_look, seen, name)) for name, quantizer in quantizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    silent = [(name, float(largest)) for name, (count, largest) in seen.items() if count == 0 and largest > 0]
    if silent:
        amax = {name: float(quantizer.amax.max()) for name, quantizer in quantizers if quantizer.amax is not None}
        some = ", ".join(f"'{name}' (values up to {high:.3g}, amax {amax[name]:.3g})" for name, high in silent[:SHOWN])
        more = f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else ""
        logger.warning(
            "rounded to zero as a whole in the first batch: %s%s. Outliers in the calibration data made amax so large, "
            "and behind these nothing can be learned. Calibrate by entropy or a percentile, or with other data.",
            some,
            more,
        )


@torch.no_grad()
def _look(
    seen: dict[str, tuple[Tensor, Tensor]], name: str, module: TensorQuantizer, inputs: tuple[Any, ...], y: Any
) -> None:
    x = inputs[0] if inputs else None
    if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.numel():
        seen[name] = torch.count_nonzero(y), x.detach().abs().amax().float()
