"""Image classification: its data, network, loss and metrics; the stages are `recipes.run`'s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from qat.distributed import world_size
from qat.errors import ConfigError
from qat.runtime.runner import Runner, fixed_batch, run_in_batches
from qat.training import supervised_loss
from qat.training.faults import explain_loading, explain_memory
from qat.training.trainer import LossFn
from recipes.data import ImageData, Loader, load_data
from recipes.models import build_model
from recipes.run import SMALLER_EVALUATION, Metrics, Run


def classification_loss(label_smoothing: float = 0.0) -> Any:
    """Cross entropy; auxiliary heads (GoogLeNet, Inception) count 0.3 each (Szegedy et al. 2014)."""

    def loss(output: Any, labels: Tensor) -> Tensor:
        heads = [output] if isinstance(output, Tensor) else [head for head in output if head is not None]
        losses = [F.cross_entropy(head, labels, label_smoothing=label_smoothing) for head in heads]
        total: Tensor = losses[0] + 0.3 * torch.stack(losses)[1:].sum()
        return total

    return loss


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, device: torch.device, progress: bool = False) -> Metrics:
    """Top-1 and top-5 in percent and mean cross entropy, over all ranks, in float32; the training flag is restored."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in tqdm(loader, "evaluate", disable=not progress, leave=False):
        x, y = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        totals += batch_totals(model(x).float(), y)
    model.train(was_training)
    if world_size() > 1:
        dist.all_reduce(totals)
    return to_metrics(totals)


def batch_totals(logits: Tensor, labels: Tensor) -> Tensor:
    """Correct within the first, correct within the first five, summed loss, count; float64, shape (4,)."""
    hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    count = torch.tensor(len(labels), device=loss.device)
    return torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss.double(), count.double()])


def to_metrics(totals: Tensor) -> Metrics:
    """Percentages and mean loss from summed `batch_totals`."""
    top1, top5, loss, count = totals.tolist()
    if not count:
        raise ConfigError("there are no validation images. Check data.dir.")
    return {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "val_loss": loss / count}


class Classification(Run):
    """The stages of one run on labelled images."""

    metric = "top1"
    data: ImageData

    def load_data(self) -> ImageData:
        """The loaders."""
        return load_data(self.config.data, self.config.seed, self.device)

    def make_loss(self) -> LossFn:
        """Cross entropy."""
        return supervised_loss(classification_loss(self.config.label_smoothing))

    def build(self, pretrained: bool = True) -> nn.Module:
        """A network of torchvision."""
        model = self.config.model if pretrained else replace(self.config.model, weights=None, checkpoint=None)
        return build_model(model, len(self.data.classes))

    def example_inputs(self) -> tuple[Tensor]:
        """Two validation images, shape (2, 3, size, size), on the CPU."""
        images: Tensor = next(iter(self.data.val))[0]
        return (images[:2].float().cpu(),)

    def export_options(self) -> dict[str, Any]:
        """Dynamic batch by the configuration; the classes as metadata."""
        metadata = {"model": self.config.model.name, "classes": ",".join(self.data.classes)[:1000]}
        return {"dynamic_batch": self.config.export.dynamic_batch, "metadata": metadata}

    def evaluate(self, model: nn.Module) -> Metrics:
        """Top-1, top-5 and loss on the validation images."""
        with explain_loading(lambda: "evaluation"), explain_memory("evaluation", lambda: SMALLER_EVALUATION):
            return evaluate(model, self.data.val, self.device)

    def evaluate_runner(self, runner: Runner, limit: int | None = None, progress: bool = True) -> Metrics:
        """Metrics of a model with one input and one output behind any runner, on the first `limit` images or all."""
        totals = torch.zeros(4, dtype=torch.float64)
        for images, labels in tqdm(self.data.val, "evaluate", disable=not progress, leave=False):
            batch = {runner.input_names[0]: images.float().cpu().numpy()}
            outputs = run_in_batches(runner, batch, fixed_batch(runner) or len(images), pad_last=True)
            totals += batch_totals(torch.from_numpy(outputs[runner.output_names[0]]), labels.cpu())
            if limit is not None and totals[3] >= limit:
                break
        return to_metrics(totals)
