"""What can be left float by itself: layers and operations, joined where they share a quantizer, and blocks of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from qat.errors import ConfigError
from qat.quantizer import QuantizerState, named_quantizers
from qat.summary import summary

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PRODUCT = re.compile(r"(?:^|\.)matmul(?:_\d+)?$")


@dataclass(frozen=True)
class Unit:
    """Layers and functional operations that are quantized together or left float together.

    Attributes:
        members: their names as `qat.summary` has them, and as `exclude` of `qat.prepare` takes them.
        quantizers: names of their quantizers.
    """

    members: tuple[str, ...]
    quantizers: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first member."""
        return self.members[0]


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Every unit that quantizes, in module order.

    A quantizer that several layers read belongs to all of them, so they make one unit; the products of an attention
    make one too, since attention is quantized as a whole. Quantizers that pass through already are in none.

    Raises:
        ConfigError: a quantizer has no amax, or is calibrating; or none quantizes.
    """
    for name, quantizer in named_quantizers(model):
        if quantizer.state is QuantizerState.CALIBRATING or not (
            quantizer.calibrated or quantizer.state is QuantizerState.PASSTHROUGH
        ):
            raise ConfigError(f"quantizer '{name}' is not calibrated. Run qat.calibrate(model, batches) first.")
    groups: list[tuple[set[str], dict[str, None], list[str]]] = []
    for row in summary(model).quantizers:
        if row.state != "quantizing":
            continue
        keys, members, quantizers = {_key(reader) for reader in row.readers}, dict.fromkeys(row.readers), [row.name]
        apart = []
        for group in groups:
            if keys.isdisjoint(group[0]):
                apart.append(group)
            else:
                keys, members, quantizers = keys | group[0], {**group[1], **members}, group[2] + quantizers
        groups = [*apart, (keys, members, quantizers)]
    if not groups:
        raise ConfigError(f"no quantizer of {type(model).__name__} quantizes. Prepare and calibrate the model first.")
    position = {name: number for number, (name, _) in enumerate(named_quantizers(model))}
    units = [Unit(tuple(members), tuple(sorted(names, key=position.__getitem__))) for _, members, names in groups]
    return tuple(sorted(units, key=lambda unit: position[unit.quantizers[0]]))


def _key(reader: str) -> str:
    """What the readers of one unit have in common: the name, or for the products of an attention their module's."""
    return _PRODUCT.sub(".matmul", reader)


def find_blocks(model: nn.Module, units: Sequence[Unit]) -> dict[str, tuple[Unit, ...]]:
    """Units by block, in order; a unit in no block is a block by itself.

    A block is the outermost module of several units that is an element of a container (`layer1.0` of a ResNet,
    `encoder.layers.3` of a transformer), else a direct child of the model (`inception3a`) that holds no such element.
    """
    modules = dict(model.named_modules())
    held = Counter(name for unit in units for name in _ancestors(unit.name) if name in modules)
    several = {name for name, count in held.items() if count > 1 and not isinstance(modules[name], CONTAINERS)}
    elements = {name for name in several if isinstance(modules[name.rpartition(".")[0]], CONTAINERS)}
    direct = {name for name in several if "." not in name and not any(e.startswith(f"{name}.") for e in elements)}
    blocks: dict[str, list[Unit]] = {}
    for unit in units:
        block = next((name for name in _ancestors(unit.name) if name in elements | direct), unit.name)
        blocks.setdefault(block, []).append(unit)
    return {name: tuple(found) for name, found in blocks.items()}


def _ancestors(name: str) -> list[str]:
    """The names of the modules around a layer, outermost first, without the model's own."""
    return [name[:end] for end, character in enumerate(name) if character == "."]
