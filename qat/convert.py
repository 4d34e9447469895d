"""Converting an existing model in place, choosing layers by name, type or predicate."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from qat.descriptor import QuantDescriptor
from qat.errors import ConfigError
from qat.nn import conversion_obstacle, quant_class_for
from qat.quantizer import TensorQuantizer, name_quantizers

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A name glob ("layer1.*"), a module class, or a function of (name, module)."""

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
        Names converted and names left float; the reasons are kept for `qat.summary` too.

    Raises:
        ConfigError: a name glob matches no layer (exactly spelled names only), or nothing was converted.
    """
    chosen: list[Selector] = list(WEIGHTED) if include is None else _selectors(include)
    refused = _selectors(exclude)
    _check_globs(model, [*chosen, *refused])
    blocked = dict(_functional_children(model))
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), None)
    converted: list[str] = []
    left_float: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if _is_quantized(module):
            continue
        selected = _match(chosen, name, module)
        if selected is None:
            if isinstance(module, WEIGHTED):
                left_float[name] = "not selected"
            continue
        if quant_class_for(module) is None:
            continue
        exclusion = _match(refused, name, module)
        reason = f"excluded by {exclusion}" if exclusion else blocked.get(name) or conversion_obstacle(module)
        if reason:
            left_float[name] = reason
            continue
        _convert(module, input_desc, weight_desc, device)
        converted.append(name)
    if not converted and not any(_is_quantized(module) for module in model.modules()):
        raise ConfigError(
            f"no layer of {type(model).__name__} was converted. Left float: {left_float or 'none known'}."
        )
    for name, module in model.named_modules():
        module._qat_float_reason = left_float.get(name, "")
    name_quantizers(model)
    return ConversionReport(tuple(converted), left_float)


def _convert(
    module: nn.Module,
    input_desc: QuantDescriptor | None,
    weight_desc: QuantDescriptor | None,
    device: torch.device | None,
) -> None:
    quant_class = quant_class_for(module)
    assert quant_class is not None
    if (
        weight_desc is not None
        and weight_desc.axis is not None
        and isinstance(module, nn.modules.conv._ConvTransposeNd)
    ):
        weight_desc = replace(weight_desc, axis=None)
    quant_class.convert_(module, input_desc, weight_desc, device)


def _is_quantized(module: nn.Module) -> bool:
    return any(isinstance(child, TensorQuantizer) for child in module.children())


def _selectors(value: Selector | Iterable[Selector]) -> list[Selector]:
    if isinstance(value, str | type) or callable(value):
        return [value]
    return list(value)


def _match(selectors: list[Selector], name: str, module: nn.Module) -> str | None:
    """The first selector that takes this module, in words, or None."""
    for selector in selectors:
        if isinstance(selector, str):
            if fnmatch.fnmatchcase(name, selector):
                return repr(selector)
        elif isinstance(selector, type):
            if isinstance(module, selector):
                return selector.__name__
        elif selector(name, module):
            return getattr(selector, "__name__", "predicate")
    return None


def _check_globs(model: nn.Module, selectors: list[Selector]) -> None:
    names = [name for name, _ in model.named_modules()]
    for selector in selectors:
        if isinstance(selector, str) and not any(fnmatch.fnmatchcase(name, selector) for name in names):
            near = difflib.get_close_matches(selector, names, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else "See the names in model.named_modules()."
            raise ConfigError(f"layer name {selector!r} matches nothing in {type(model).__name__}. {hint}")


def _functional_children(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            for child, _ in module.named_modules(prefix=name):
                if child != name:
                    yield child, "nn.MultiheadAttention reads its weights directly, so quantizers would be bypassed"
