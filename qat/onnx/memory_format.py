"""Memory formats during an export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def contiguous_weights(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers in the default memory format inside the block, as they were after it.

    From channels_last weights or inputs torch.export (2.14) writes adaptive pooling as a Gather over computed
    addresses, which fuses with nothing.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_contiguous()]
    before = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.contiguous()
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data
