"""Converting an existing model in place, choosing layers by name, type or predicate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from qat.descriptor import QuantDescriptor
from qat.errors import ConfigError
from qat.nn import conversion_obstacle, quant_class_for
from qat.quantizer import TensorQuantizer, name_quantizers
from qat.selectors import Selector, as_selectors, check_globs, match_selector

WEIGHTED: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Converted when nothing is said: TensorRT wants Q/DQ at the inputs of these and nowhere else."""


READS_WEIGHTS = ("MultiheadAttention", "ShiftedWindowAttention")
"""Modules of torch and torchvision (Swin, both versions) that pass their children's weights to a function."""


@dataclass(frozen=True)
class ConversionReport:
    """What `quantize_` did.

    Attributes:
        converted: names of the layers that have quantizers now.
        left_float: name of each layer that could have been converted and was not, with the reason.
    """

    converted: tuple[str, ...]
    left_float: dict[str, str]


def quantize_(
    model: nn.Module,
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] = (),
    input_desc: QuantDescriptor | None = None,
    weight_desc: QuantDescriptor | None = None,
) -> ConversionReport:
    """Convert layers of `model` in place to their quantized versions; parameters, hooks and sharing stay.

    Args:
        model: any module; a layer by itself is converted too.
        include: which layers to convert; None means every convolution, transposed convolution and linear layer.
        exclude: which of those to leave float; it wins over include.
        input_desc: descriptor of input quantizers, None for the class's default.
        weight_desc: descriptor of weight quantizers, None for the class's default. Transposed convolutions keep
            one scale per tensor whatever its axis, since TensorRT runs their per-channel form in float.

    Returns:
        Names converted and names left float; the reasons are kept for `qat.summary` too. Reasons of an earlier call,
        or of `qat.prepare`, stay where this one selects nothing.

    Raises:
        ConfigError: a name glob matches no layer (exactly spelled names only), or nothing was converted.
    """
    chosen: list[Selector] = list(WEIGHTED) if include is None else as_selectors(include)
    refused = as_selectors(exclude)
    check_globs([name for name, _ in model.named_modules()], [*chosen, *refused], type(model).__name__)
    blocked = dict(_functional_children(model))
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), None)
    converted: list[str] = []
    left_float: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if _is_quantized(module):
            continue
        selected = match_selector(chosen, name, module)
        if selected is None:
            if isinstance(module, WEIGHTED):
                left_float[name] = getattr(module, "_qat_float_reason", "") or "not selected"
            continue
        if quant_class_for(module) is None:
            continue
        exclusion = match_selector(refused, name, module)
        reason = f"excluded by {exclusion}" if exclusion else blocked.get(name) or conversion_obstacle(module)
        if reason:
            left_float[name] = reason
            continue
        convert_layer(module, input_desc, weight_desc, device)
        converted.append(name)
    if not converted and not any(_is_quantized(module) for module in model.modules()):
        raise ConfigError(
            f"no layer of {type(model).__name__} was converted. Left float: {left_float or 'none known'}."
        )
    for name in (*converted, *left_float):
        vars(model.get_submodule(name))["_qat_float_reason"] = left_float.get(name, "")
    close_fast_paths(module for module in model.modules() if any(map(_is_quantized, module.modules())))
    name_quantizers(model)
    return ConversionReport(tuple(converted), left_float)


def convert_layer(
    module: nn.Module,
    input_desc: QuantDescriptor | None,
    weight_desc: QuantDescriptor | None,
    device: torch.device | None,
) -> None:
    """Convert one layer in place; a transposed convolution keeps one weight scale whatever the descriptor's axis."""
    quant_class = quant_class_for(module)
    assert quant_class is not None
    if (
        weight_desc is not None
        and weight_desc.axis is not None
        and isinstance(module, nn.modules.conv._ConvTransposeNd)
    ):
        weight_desc = replace(weight_desc, axis=None)
    quant_class.convert_(module, input_desc, weight_desc, device)


def close_fast_paths(modules: Iterable[nn.Module]) -> None:
    """Let torch's transformer encoders call their submodules, in evaluation too.

    The fused path of nn.TransformerEncoderLayer reads the layers' weights past their quantizers. nn.TransformerEncoder
    packs padded batches into nested tensors for it, which the quantizers cannot take.
    """
    for module in modules:
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _is_quantized(module: nn.Module) -> bool:
    return any(isinstance(child, TensorQuantizer) for child in module.children())


def _functional_children(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        kind = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in READS_WEIGHTS), None)
        if kind:
            for child, _ in module.named_modules(prefix=name):
                if child != name:
                    yield child, f"{kind} reads its weights directly, so quantizers would be bypassed"
