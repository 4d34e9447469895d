"""Figures, drawn without a display, as files and as parts of a page."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from qat.files import atomic_write

COLOURS = {"float": "#4c566a", "PTQ": "#d08770", "QAT": "#5e81ac", "ONNX": "#a3be8c"}
GREY, RED = "#999999", "#bf616a"


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure: Any, path: str | Path) -> None:
    """Write a PNG, atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def to_svg(figure: Any) -> str:
    """An <svg> element to put into a page: text stays text, and nothing outside the page is needed."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def plain_text(name: str) -> str:
    """A name as matplotlib draws it unchanged: a dollar sign would start a formula."""
    return name.replace("$", r"\$")


def shortened(name: str, length: int = 40) -> str:
    """The end of a long name, which tells layers apart better than its beginning; ready to be drawn."""
    return plain_text(name if len(name) <= length else f"…{name[1 - length :]}")
