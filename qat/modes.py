"""Putting a model in another mode for a while; everything is as it was afterwards, also after an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qat.quantizer import QuantizerState, TensorQuantizer


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode inside the block, each one's own training flag again after it."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def passing_through(quantizers: Iterable[TensorQuantizer]) -> Iterator[None]:
    """These quantizers pass their tensors through inside the block; states and reasons are restored."""
    saved = [(quantizer, quantizer.state, quantizer.reason) for quantizer in quantizers]
    try:
        for quantizer, _, _ in saved:
            quantizer.state = QuantizerState.PASSTHROUGH
        yield
    finally:
        for quantizer, state, reason in saved:
            quantizer.state, quantizer.reason = state, reason


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 on a GPU inside the block: its 10-bit mantissa is not rounding that a comparison may put up with."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
