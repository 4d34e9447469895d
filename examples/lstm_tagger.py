"""A sequence tagger: embedding, bidirectional LSTM, a linear layer for every word.

After Huang, Xu and Yu, "Bidirectional LSTM-CRF Models for Sequence Tagging" (2015), without the CRF. Trained on an
artificial language in which a tag depends on words before and behind: `python lstm_tagger.py`.
"""
# ruff: noqa: D102, D103

from __future__ import annotations

import torch
import torch.nn.functional as F
from fitting import fit
from torch import Tensor, nn

SCORE = "tags right, %"
WORDS, OPENING, CLOSING, LENGTH = 80, (1, 2, 3), (4, 5, 6), 12
TAGS = 1 + len(OPENING) * len(CLOSING)


class Network(nn.Module):
    """Word numbers (N, T) to tag logits (N, T, tags)."""

    def __init__(self, width: int = 32, hidden: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.dropout = nn.Dropout(0.1)
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(2 * hidden, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(words)))
        return self.tag(self.dropout(states))


def make_batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sentences (N, 12) with one bracket each, and tags: 0 outside of it, inside the pair of its two ends."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(7, WORDS, (size, LENGTH), generator=g)
    start = torch.randint(0, LENGTH - 3, (size, 1), generator=g)
    end = start + torch.randint(2, LENGTH, (size, 1), generator=g)
    end = end.clamp(max=LENGTH - 1)
    first = torch.randint(len(OPENING), (size, 1), generator=g)
    second = torch.randint(len(CLOSING), (size, 1), generator=g)
    words.scatter_(1, start, first + OPENING[0]).scatter_(1, end, second + CLOSING[0])
    place = torch.arange(LENGTH)
    inside = (place >= start) & (place <= end)
    return words, inside * (1 + first * len(CLOSING) + second)


def train(model: nn.Module, steps: int = 300, lr: float = 1e-2) -> None:
    def loss_of(seed: int) -> Tensor:
        words, tags = make_batch(64, seed)
        return F.cross_entropy(model(words).flatten(0, 1), tags.flatten())

    fit(model, torch.optim.Adam(model.parameters(), lr), loss_of, steps)


@torch.no_grad()
def score(model: nn.Module, seed: int = 0, size: int = 512) -> float:
    words, tags = make_batch(size, seed)
    return 100 * float((model(words).argmax(-1) == tags).float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    network = Network()
    train(network)
    print(f"{SCORE}: {score(network):.1f}")
