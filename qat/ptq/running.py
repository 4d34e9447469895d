"""What every step after calibration needs: batches on the device, the quantized layers, means over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qat.calibration import to_device
from qat.convert import WEIGHTED
from qat.distributed import world_size
from qat.errors import CalibrationError
from qat.quantizer import QuantizerState, TensorQuantizer, name_quantizers, named_quantizers


def batches_on_device(model: nn.Module, batches: Iterable[Any], num_batches: int | None) -> list[Any]:
    """The batches on the model's device, kept for several passes.

    Raises:
        CalibrationError: there are none.
    """
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    found = [to_device(batch, device) for batch in islice(batches, num_batches)]
    if not found:
        raise CalibrationError("there were no calibration batches. Check the data folder and the number of batches.")
    return found


def example_of(batch: Any) -> Any:
    """What the model is called with in `qat.calibration.run_batch`, in the form that a trace takes."""
    return batch[0] if isinstance(batch, list | tuple) else batch


def quantized_layers(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Convolutions and linear layers with a quantized weight, by name in module order; and what else has one, and why.

    Raises:
        CalibrationError: no layer has a quantized weight.
    """
    name_quantizers(model)
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "_weight_quantizer", None)
        if not isinstance(module, WEIGHTED) or not isinstance(quantizer, TensorQuantizer):
            continue
        if quantizer.state is QuantizerState.QUANTIZING:
            layers[name] = module
    if not layers:
        raise CalibrationError("no layer has a quantized weight. Call qat.prepare and qat.calibrate first.")
    known = {f"{name}._weight_quantizer" for name in layers}
    weights = ((name, q) for name, q in named_quantizers(model) if q.descriptor.narrow_range)
    others = [name for name, q in weights if q.state is QuantizerState.QUANTIZING and name not in known]
    return layers, dict.fromkeys(others, "its weight is used in a function, not in a layer")


def channel_dim(layer: nn.Module) -> int:
    """Dimension of the output channels, counted from the end."""
    return -1 if isinstance(layer, nn.Linear) else -len(layer.kernel_size) - 1  # type: ignore[arg-type]


@contextmanager
def forward_hooks(hooks: Iterable[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Forward hooks inside the block."""
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def average_over_ranks(*tensors: Tensor) -> None:
    """Replace each tensor by its mean over ranks."""
    if world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(world_size())
