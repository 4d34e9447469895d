"""A table of every quantizer and of every layer left float, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from qat.quantizer import QuantizerState, named_quantizers


@dataclass(frozen=True)
class QuantizerRow:
    """One quantizer: amax and scale are the (smallest, largest) over channels, None before calibration."""

    name: str
    state: str
    num_bits: int
    axis: int | None
    amax: tuple[float, float] | None
    scale: tuple[float, float] | None
    channels: int
    dead: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Summary:
    """Every quantizer, and every convertible layer that stays float with its reason. str() is the table."""

    quantizers: tuple[QuantizerRow, ...]
    left_float: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"quantizers": [asdict(row) for row in self.quantizers], "left_float": self.left_float}

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(_table(self))
        return capture.get().rstrip()


def summary(model: nn.Module) -> Summary:
    """What is quantized how, and what is left float and why."""
    rows = []
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
            )
        )
    reasons = {name: str(getattr(module, "_qat_float_reason", "")) for name, module in model.named_modules()}
    return Summary(tuple(rows), {name: reason for name, reason in reasons.items() if reason})


def _table(result: Summary) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("quantizer", "state", "axis", "amax", "scale", "note")
    for row in result.quantizers:
        note = row.reason or (f"dead: {len(row.dead)} of {row.channels}" if row.dead else "")
        axis = "tensor" if row.axis is None else str(row.axis)
        table.add_row(escape(row.name), row.state, axis, _span(row.amax), _span(row.scale), escape(note))
    for name, reason in result.left_float.items():
        table.add_row(escape(name), "float", "", "", "", escape(reason))
    return table


def _span(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    low, high = values
    return f"{low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"
