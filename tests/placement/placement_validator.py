"""What is quantized in a prepared model, read from torch.export's graph rather than from what placement says."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import qat


def calibrated(model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    model.eval()
    qat.calibrate(model, [inputs], progress=False, forward=lambda m, batch: m(*batch))
    return model


def quantized_edges(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, list[str]]:
    """Operators that read each activation quantizer's output: first name of the quantizer -> sorted operator names.

    A quantizer called twice on one tensor is one edge source, as in the exported file; on several tensors (a shared
    scale) the readers of all of them are listed.
    """
    first = {quantizer: name for name, quantizer in qat.named_quantizers(model)}
    program = torch.export.export(model, inputs, strict=False)
    buffers = program.graph_signature.inputs_to_buffers
    found: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.target is not torch.ops.qat.fake_quantize.default:
            continue
        key = buffers[node.args[1].name].removesuffix("._amax")
        name = first[model.get_submodule(key)]
        if name.endswith("weight_quantizer"):
            continue
        found.setdefault(name, []).extend(user.target.__name__.split(".")[0].rstrip("_") for user in node.users)
    return {name: sorted(users) for name, users in found.items()}
