"""A tiny quantized model, data with random augmentation, and a command line that trains it; run in subprocesses too."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
from qat.quantizer import TensorQuantizer
from qat.training import (
    DistillConfig,
    TrainConfig,
    TrainResult,
    distilled_loss,
    fine_tune,
    make_loader,
    supervised_loss,
)

FEATURES, CLASSES = 6, 3


class TinyNet(nn.Module):
    """Linear, BatchNorm, dropout and a fake-quantized linear layer."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, quantize: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, CLASSES)
        self.quantize = quantize
        if quantize:
            self.input_quantizer = TensorQuantizer()
            self.weight_quantizer = TensorQuantizer(QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL)
            self.input_quantizer.amax = 2.0
            self.weight_quantizer.amax = self.head.weight.detach().abs().amax(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.norm(self.first(x))))
        if not self.quantize:
            return self.head(x)
        return F.linear(self.input_quantizer(x), self.weight_quantizer(self.head.weight), self.head.bias)


class NoisyData(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from python, numpy and torch; the label is the sign pattern of two features."""

    def __init__(self, size: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(size, FEATURES, generator=generator)
        self.labels = (self.inputs[:, 0] > 0).long() + (self.inputs[:, 1] > 0).long()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.inputs[index]
        if self.noise:
            x = x + self.noise * (torch.randn(FEATURES) + random.random() + float(np.random.rand()))
        return x, self.labels[index]


def evaluate(model: nn.Module) -> dict[str, float]:
    data = NoisyData(64)
    hits = model(data.inputs.to(next(model.parameters()).device)).argmax(1).cpu() == data.labels
    return {"accuracy": hits.double().mean().item()}


def quiet(**changes: Any) -> TrainConfig:
    """A config without bar and TensorBoard."""
    return TrainConfig(**{"progress": False, "tensorboard": False, "lr": 0.05, "epochs": 2, **changes})


def train(
    folder: Path, model: nn.Module | None = None, config: TrainConfig | None = None, **loader: Any
) -> TrainResult:
    """fine_tune of a tiny model on 64 samples."""
    if model is None:
        torch.manual_seed(0)
        model = TinyNet()
    options: dict[str, Any] = {"batch_size": 8, "seed": 1, **loader}
    data = options.pop("dataset", None) or NoisyData(64)
    criterion = supervised_loss(nn.CrossEntropyLoss())
    return fine_tune(model, make_loader(data, **options), criterion, evaluate, config or quiet(), folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--distill", action="store_true", help="from a random teacher, logits and features")
    parser.add_argument("--sleep-after", type=int, default=-1, help="optimizer steps after which to wait to be killed")
    parser.add_argument("--fail-after", type=int, default=-1, help="optimizer steps after which to raise")
    parser.add_argument("--config", type=json.loads, default={})
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TinyNet(args.dropout, args.norm)
    # Made before the process group exists, as scripts do.
    loader = make_loader(NoisyData(64, args.noise), args.batch_size, seed=1, num_workers=args.workers)
    criterion, calls = supervised_loss(nn.CrossEntropyLoss()), 0
    if args.distill:
        settings = DistillConfig(weight=0.5, features=("first", "norm"))
        criterion = distilled_loss(criterion, TinyNet(norm=args.norm, quantize=False), settings)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        if calls == args.sleep_after:
            print("WAITING", flush=True)
            input()
        if calls == args.fail_after:
            raise SystemExit(3)
        calls += 1
        return criterion(model, batch)

    result = fine_tune(model, loader, loss_fn, evaluate, quiet(**args.config), args.folder)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(model.state_dict(), args.folder / f"final{rank}.pt")
    print(f"RESUMED {result.resumed_at_step}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
