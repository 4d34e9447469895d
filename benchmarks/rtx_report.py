"""Table and picture of the placement benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qat.files import atomic_write
from qat.report import format_table

COLUMNS = ("network / placement / rest", "weighted", "with Q/DQ", "in INT8", "float", "Q/DQ kernels", "reformats",
           "adds", "reading INT8", "requantized", "kernels", "MiB moved")  # fmt: skip
KEYS = ("weighted", "quantized", "int8", "float", "standalone_qdq", "reformats", "adds", "adds_int8",
        "requantized_adds", "kernels", "traffic_mib")  # fmt: skip
COLOURS = {"traced": "#5e81ac", "modules": "#d08770", "modelopt": "#a3be8c"}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a row; below it, what was refused or not exported and which layers were lost."""
    cells, notes = [], []
    for name, row in rows.items():
        cells.append([name, *(str(row.get(key, "-")) for key in KEYS)])
        notes += [
            f"{name}: {kind.replace('_', ' ')}: {row[kind]}" for kind in ("refused", "export_error") if kind in row
        ]
        notes += [f"{name}: lost: {lost}" for lost in row.get("lost", ())]
    shown = format_table("Placement as TensorRT for RTX builds it", COLUMNS, cells)
    return "\n".join([shown, *notes])


def plot(path: Path, rows: Mapping[str, Mapping[str, Any]], precision: str = "fp16") -> None:
    """Bars for each network and placement: Q/DQ kernels and the traffic of activations."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    shown = {tuple(name.split("/")[:2]): row for name, row in rows.items() if name.endswith(f"/{precision}")}
    networks = list(dict.fromkeys(network for network, _ in shown))
    panels = {"standalone_qdq": "kernels that only quantize or dequantize", "traffic_mib": "MiB of activations moved"}
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for offset, (placement, colour) in enumerate(COLOURS.items(), start=-1):
            found = [shown.get((network, placement), {}).get(key) for network in networks]
            places = [index + 0.27 * offset for index in range(len(networks))]
            axes.bar(places, [value or 0 for value in found], 0.25, color=colour, label=placement)
            for place, value in zip(places, found, strict=True):
                label = "not built" if value is None else f"{value:g}"
                axes.annotate(label, (place, value or 0), ha="center", va="bottom", fontsize=6, rotation=90)
        axes.set_xticks(range(len(networks)), networks, rotation=20, ha="right", fontsize=8)
        axes.set_title(f"{title} ({precision} remainder)", fontsize=9)
        axes.margins(y=0.15)
        axes.legend(fontsize=8)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
