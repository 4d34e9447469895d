"""What AOTAutograd is told where a model with quantizers goes through torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch._functorch.config as functorch
from torch import nn

from qat.quantizer import named_quantizers

RECOMPUTED = ("ban_recompute_used_far_apart", "ban_recompute_long_fusible_chains")
"""Bans of the partitioner, by which it saves what it could compute again."""


@contextmanager
def recomputed_masks(model: nn.Module) -> Iterator[None]:
    """Surround the first calls of a compiled model with this: the backward pass computes masks and scales again.

    Between forward and backward torch.compile keeps what is used far apart or ends a long chain of elementwise
    operations. With quantizers that is a byte an element for the mask of a residual add's ReLU, another for the
    quantizer's behind it, and a kernel for each scale, although all of it follows from tensors that are kept anyway.
    `qat.training.fine_tune` does it by itself. A model without quantizers is compiled as always.
    """
    settings: dict[str, Any] = {name: False for name in RECOMPUTED if hasattr(functorch, name)}
    if next(named_quantizers(model), None) is None:
        settings = {}
    with functorch.patch(settings):
        yield
