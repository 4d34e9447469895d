"""What every quantizer of a torch model sees and returns in one forward pass."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qat.modes import evaluation_mode, full_precision
from qat.onnx.inputs import as_call, map_tensors, tensors_in
from qat.quantizer import QuantizerState, named_quantizers


@dataclass(frozen=True)
class Call:
    """One distinct tensor through one quantizer: copies of input and output on the CPU.

    For a parameter, which stays as it is, x is that parameter itself and y None: copies of a large model's weights
    would take twice its memory.
    """

    x: Tensor
    y: Tensor | None


@dataclass(frozen=True)
class Capture:
    """Outputs of the model, and the calls of each quantizer by name, in order."""

    outputs: list[Tensor]
    calls: dict[str, list[Call]]


def run_torch(model: nn.Module, inputs: Any, calls: bool = True) -> Capture:
    """Run the model once in evaluation mode on its own device.

    Args:
        model: left as it was, also after an error.
        inputs: tensor, sequence or mapping; tensors are moved to the model's device.
        calls: record the quantizers too. A quantizer that sees one tensor twice has one call, as in the file.

    Returns:
        Outputs and calls.
    """
    found = next(iter([*model.parameters(), *model.buffers()]), None)
    if found is not None:
        inputs = map_tensors(inputs, lambda tensor: tensor.to(found.device))
    args, kwargs = as_call(inputs)
    recorded: dict[str, list[Call]] = {}
    seen: dict[str, list[tuple[Tensor, int]]] = {}

    def hook(name: str) -> Any:
        def record(_module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
            x = given[0]
            before = seen.setdefault(name, [])
            if any(x is other and x._version == count for other, count in before):
                return
            before.append((x, x._version))
            copies = (tensor.detach().to("cpu", copy=True) for tensor in (x, y))
            call = Call(x, None) if isinstance(x, nn.Parameter) else Call(*copies)
            recorded.setdefault(name, []).append(call)

        return record

    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(full_precision())
        for name, quantizer in named_quantizers(model) if calls else ():
            if quantizer.state is QuantizerState.QUANTIZING:
                stack.callback(quantizer.register_forward_hook(hook(name)).remove)
        result = model(*args, **kwargs)
    return Capture([tensor.detach().cpu() for tensor in tensors_in(result)], recorded)
