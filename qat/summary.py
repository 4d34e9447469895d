"""A table of every quantizer and of every layer left float, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from qat.quantizer import QuantizerState, TensorQuantizer, named_quantizers


@dataclass(frozen=True)
class QuantizerRow:
    """One quantizer.

    Attributes:
        name: its first module name.
        state: "quantizing", "calibrating" or "passthrough".
        num_bits: width of the integer.
        axis: dimension with one scale per index, None for one scale.
        amax: (smallest, largest) over channels, None before calibration.
        scale: likewise.
        channels: number of scales, 0 before calibration.
        dead: channels that were all zero in calibration.
        reason: why it passes through.
        shared_by: every module name it has; more than one where layers share it.
        tensors: what it quantizes, in words; several where one scale serves several tensors.
        readers: layers and functional operations that read it there.
    """

    name: str
    state: str
    num_bits: int
    axis: int | None
    amax: tuple[float, float] | None
    scale: tuple[float, float] | None
    channels: int
    dead: tuple[int, ...]
    reason: str
    shared_by: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """What is quantized, what is not and why. str() is the table.

    Attributes:
        quantizers: every quantizer once.
        left_float: layers, and functional operations such as "layer1.0.add", that stay float, each with the reason.
        notes: what placement could not see, by module; "" is the whole model.
    """

    quantizers: tuple[QuantizerRow, ...]
    left_float: dict[str, str]
    notes: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "quantizers": [asdict(row) for row in self.quantizers],
            "left_float": self.left_float,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=180, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(_table(self))
        return capture.get().rstrip()


def summary(model: nn.Module) -> Summary:
    """What is quantized how, who shares a quantizer, and what is left float and why."""
    rows = []
    paths: dict[TensorQuantizer, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TensorQuantizer):
            paths.setdefault(module, []).append(path)
    for name, quantizer in named_quantizers(model):
        amax, scale = quantizer.amax, quantizer.scale
        rows.append(
            QuantizerRow(
                name=name,
                state=quantizer.state.name.lower(),
                num_bits=quantizer.descriptor.num_bits,
                axis=quantizer.descriptor.axis,
                amax=None if amax is None else (amax.min().item(), amax.max().item()),
                scale=None if scale is None else (scale.min().item(), scale.max().item()),
                channels=0 if amax is None else amax.numel(),
                dead=tuple(quantizer.dead),
                reason=quantizer.reason if quantizer.state is QuantizerState.PASSTHROUGH else "",
                shared_by=tuple(paths[quantizer]),
                tensors=getattr(quantizer, "_qat_tensors", None) or _tensor_by_place(name),
                readers=getattr(quantizer, "_qat_readers", None) or (name.rpartition(".")[0],),
            )
        )
    return Summary(tuple(rows), _float_reasons(model), dict(getattr(model, "_qat_notes", {})))


def _tensor_by_place(name: str) -> tuple[str, ...]:
    """What a quantizer that was not placed by tracing quantizes, from its name: `fc._weight_quantizer`."""
    layer, _, attribute = name.rpartition(".")
    return (f"{attribute.removesuffix('_quantizer').strip('_').replace('_', ' ')} of {layer or 'the model'}",)


def _float_reasons(model: nn.Module) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        reasons[name] = str(getattr(module, "_qat_float_reason", ""))
        operations: dict[str, str] = getattr(module, "_qat_float_operations", {})
        reasons |= {f"{name}.{operation}".lstrip("."): reason for operation, reason in operations.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _table(result: Summary) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("quantizer", "tensor", "state", "axis", "amax", "scale", "note")
    for row in result.quantizers:
        notes = [row.reason, f"dead: {len(row.dead)} of {row.channels}" if row.dead else "", _sharing(row)]
        axis = "tensor" if row.axis is None else str(row.axis)
        cells = (row.name, _some(row.tensors), row.state, axis, _span(row.amax), _span(row.scale))
        table.add_row(*(escape(cell) for cell in (*cells, "; ".join(note for note in notes if note))))
    for name, reason in result.left_float.items():
        table.add_row(escape(name), "", "float", "", "", "", escape(reason))
    for name, note in result.notes.items():
        table.add_row(escape(name or "the model"), "", "untraced", "", "", "", escape(note))
    return table


def _sharing(row: QuantizerRow) -> str:
    return f"shared by {_some(row.readers)}" if len(row.readers) > 1 else ""


def _some(names: tuple[str, ...]) -> str:
    """The first four; a scale of a DenseNet's block has dozens."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _span(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    low, high = values
    return f"{low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"
