"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text; the first column is left-aligned, the others right-aligned."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console = Console(width=160, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
