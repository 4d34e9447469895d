"""One HTML page of sections with text, charts and tables; self-contained, so that it works offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qat.files import atomic_write

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width">
<style>
body { font-family: sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
nav a { margin-right: 1em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { border: 1px solid #ccc; padding: 3px 8px; text-align: right; font-size: 13px; vertical-align: top; }
td:first-child, th, td.text { text-align: left; }
tr:nth-child(even) td { background: #f6f6f6; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
p, li { font-size: 14px; }
pre { font-size: 12px; background: #f4f4f4; padding: 8px; overflow: auto; }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ subtitle }}</p>
<nav>{% for section in sections %}<a href="#s{{ loop.index }}">{{ section.title }}</a>{% endfor %}</nav>
{% for section in sections %}
<h2 id="s{{ loop.index }}">{{ section.title }}</h2>
{% for note in section.notes %}<p>{{ note }}</p>
{% endfor %}
{% for svg in section.figures %}{{ svg | safe }}
{% endfor %}
{% for table in section.tables %}
{% if table.folded %}<details><summary>{{ table.caption }}</summary>{% elif table.caption %}<p>{{ table.caption }}</p>
{% endif %}
<div class="wide"><table><tr>{% for column in table.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}
<td{% if loop.index0 in table.text %} class="text"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% if table.folded %}</details>{% endif %}
{% endfor %}
{% if section.listing %}<pre>{{ section.listing }}</pre>{% endif %}
{% endfor %}
</body></html>
"""


@dataclass(frozen=True)
class Table:
    """A table of plain text.

    Attributes:
        columns: headings.
        rows: one text a column.
        caption: above it; what one clicks on where it is folded.
        folded: closed at first.
        text: numbers of the columns, besides the first, that are aligned to the left.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = False
    text: tuple[int, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page: paragraphs, <svg> elements from `qat.report.figures.to_svg`, tables, preformatted text."""

    title: str
    notes: Sequence[str] = ()
    figures: Sequence[str] = ()
    tables: Sequence[Table] = ()
    listing: str = ""


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page's HTML. All text is escaped; only the figures are taken as they are."""
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(title=title, subtitle=subtitle, sections=sections)


def write_page(path: str | Path, title: str, subtitle: str, sections: Sequence[Section]) -> None:
    """Write the page, atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(render_page(title, subtitle, sections), encoding="utf-8")
