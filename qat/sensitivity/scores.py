"""Scores that need no labels: how far the quantized model's outputs are from the float model's."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.calibration import Forward, run_batch, to_device
from qat.errors import ConfigError
from qat.modes import evaluation_mode, passing_through
from qat.quantizer import named_quantizers
from qat.sqnr import Sqnr


class OutputScore:
    """An `evaluate` that compares outputs with those of the model with every quantizer passing through.

    It gives "sqnr_db", the signal-to-quantization-noise ratio of all floating-point outputs in dB (larger is better),
    and "kl", the Kullback-Leibler divergence from the float to the quantized class probabilities of the first output,
    in nats a sample (smaller is better), where that output has classes.

    Args:
        model: the calibrated model; run once on every batch now.
        batches: tensors, (inputs, ...) sequences or keyword mappings; kept on the model's device.
        num_batches: how many to take, None for all.
        class_dim: dimension of the classes in the first output; None leaves "kl" out.
        forward: how one batch is run.

    Raises:
        ConfigError: there are no batches, or the model gives no floating-point tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        num_batches: int | None = None,
        class_dim: int | None = 1,
        forward: Forward = run_batch,
    ) -> None:
        device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
        self._batches = [to_device(batch, device) for batch in islice(batches, num_batches)]
        if not self._batches:
            raise ConfigError("there are no batches to score. Check the data folder and the number of batches.")
        self._class_dim, self._forward = class_dim, forward
        with evaluation_mode(model), passing_through([q for _, q in named_quantizers(model)]):
            self._references = [self._outputs(model, batch) for batch in self._batches]
        if not all(self._references):
            raise ConfigError(f"{type(model).__name__} gives no floating-point tensor, so there is nothing to score.")

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Scores of the model as it stands."""
        sqnr, divergence, samples = Sqnr(), torch.zeros((), dtype=torch.float64), 0
        for batch, references in zip(self._batches, self._references, strict=True):
            outputs = self._outputs(model, batch)
            for reference, output in zip(references, outputs, strict=True):
                sqnr.add(reference, output)
            if self._class_dim is not None and outputs[0].dim() > self._class_dim:
                divergence += _kl(references[0], outputs[0], self._class_dim).sum().cpu()
                samples += outputs[0].numel() // outputs[0].shape[self._class_dim]
        return {"sqnr_db": sqnr.db, **({"kl": float(divergence) / samples} if samples else {})}

    @torch.no_grad()
    def _outputs(self, model: nn.Module, batch: Any) -> list[Tensor]:
        from qat.onnx.inputs import tensors_in

        return [t for t in tensors_in(self._forward(model, batch)) if t.is_floating_point()]


def _kl(reference: Tensor, output: Tensor, dim: int) -> Tensor:
    p, q = (F.log_softmax(x.double(), dim) for x in (reference, output))
    return (p.exp() * (p - q)).sum(dim)
