"""The networks whose training step is timed: how each is built, its batch and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """A network with random weights.

    Attributes:
        build: makes it, on the CPU.
        batch: input and target of one step.
        loss: of its output and the target.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


class EncoderLayer(nn.Module):
    """One BERT layer: self-attention and feed-forward, each with its residual add and LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.output_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same shape."""
        n, length, width = x.shape
        shape = (n, length, self.heads, width // self.heads)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width)
        x = self.attention_norm(self.out(context) + x)
        return self.output_norm(self.down(F.gelu(self.up(x))) + x)


class Encoder(nn.Module):
    """Embedded tokens in, start and end logits of a span out, as in question answering."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.span = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to (batch, sequence, 2)."""
        return self.span(self.layers(x))  # type: ignore[no-any-return]


def _span_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def _images(name: str, quick: bool) -> Network:
    from torchvision.models import get_model

    batch, size = (2, 32) if quick else (128, 224)
    return Network(
        lambda: get_model(name),
        lambda: (torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))),
        lambda logits, target: F.cross_entropy(logits.float(), target),
    )


def _bert(quick: bool) -> Network:
    layers, width, heads, length, batch = (2, 32, 2, 16, 2) if quick else (12, 768, 12, 384, 32)
    return Network(
        lambda: Encoder(layers, width, heads),
        lambda: (torch.randn(batch, length, width), torch.randint(length, (batch, 2))),
        _span_loss,
    )


NETWORKS: Mapping[str, Callable[[bool], Network]] = {
    "resnet50": lambda quick: _images("resnet18" if quick else "resnet50", quick),
    "efficientnet_b0": lambda quick: _images("efficientnet_b0", quick),
    "bert": _bert,
}
"""By name; called with `quick`, which makes everything tiny."""
