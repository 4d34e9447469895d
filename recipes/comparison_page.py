"""The page of a comparison: one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qat.files import atomic_write
from recipes.cells import FP16, FP32, Cell
from recipes.comparison_plot import draw_svg
from recipes.comparison_table import LEGEND, Table

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font-family: sans-serif; margin: 2em; max-width: 1500px; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { border: 1px solid #ccc; padding: 3px 8px; font-size: 13px; text-align: right; }
td:nth-child(-n+2), th, .left td { text-align: left; }
tr.first td { border-top: 2px solid #555; }
.box { border-left: 5px solid; padding: 4px 12px; margin: 8px 0; }
.problem { border-color: #b00020; background: #fde7ea; }
.warning { border-color: #c77700; background: #fff4e0; }
svg { max-width: 100%; height: auto; }
small, li { color: #444; font-size: 13px; }
pre { font-size: 12px; background: #f4f4f4; padding: 8px; overflow: auto; }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ environment.cpu }}, {{ environment.cores }} cores{% for gpu in environment.gpu %}, {{ gpu }}{% endfor %};
torch on {{ device }}; {% for name, version in environment.packages.items() %}{{ name }} {{ version }}, {% endfor %}
Python {{ environment.python }}; commit {{ environment.commit }}; {{ environment.date }}.</p>
{% for text in problems %}<p class="box problem"><b>Failed:</b> {{ text }}</p>
{% endfor %}
{% for text in warnings %}<p class="box warning"><b>Warning:</b> {{ text }}</p>
{% endfor %}
<table><tr>{% for column in table.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr{% if loop.first or row[0] != loop.previtem[0] %} class="first"{% endif %}>
{%- for text in row %}<td>{{ text }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% if table.reasons %}<p>Why a cell is empty:</p>
<ol>{% for reason in table.reasons %}<li>{{ reason }}</li>{% endfor %}</ol>{% endif %}
<p>How to read it:</p>
<ul>{% for line in legend %}<li>{{ line }}</li>{% endfor %}</ul>
<h2>Pictures</h2>
{{ svg | safe }}
<h2>Layers that are not INT8</h2>
{% for cell in cells if cell.engine and cell.model not in floats %}
{% set built = cell.engine %}
<details><summary>{{ cell.model }}: {{ built.engine }}, {{ built.library }} {{ built.version }} for {{ built.target }},
built in {{ built.build_seconds }} s; {{ built.not_int8 | length }} of {{ built.weighted_layers }} weighted layers not
in INT8, {{ built.reformats }} reformats, {{ built.standalone_qdq }} standalone Q/DQ</summary>
<table class="left"><tr><th>ONNX node</th><th>operator</th><th>torch module</th><th>runs in</th><th>edge</th>
<th>cause</th></tr>
{% for op in built.not_int8 %}<tr><td>{{ op.node }}</td><td>{{ op.op_type }}</td><td>{{ op.module }}</td>
<td>{{ op.precision }}</td><td>{{ op.edge }}</td><td>{{ op.cause }}</td></tr>
{% endfor %}</table></details>
{% else %}<p>No INT8 engine was built.</p>
{% endfor %}
<h2>All times</h2>
<table><tr><th>model</th><th>runs on</th><th>measured</th><th>batch</th><th>runs</th><th>mean ms</th><th>median ms</th>
<th>p95 ms</th><th>p99 ms</th><th>samples/s</th></tr>
{% for model, backend, kind, t in times %}<tr><td>{{ model }}</td><td>{{ backend }}</td><td>{{ kind }}</td>
<td>{{ t.batch }}</td><td>{{ t.count }}</td>
{%- for key in ("mean_ms", "median_ms", "p95_ms", "p99_ms") %}<td>{{ "%.3f" | format(t[key]) }}</td>{% endfor %}
<td>{{ "%.1f" | format(t.throughput) }}</td></tr>
{% endfor %}</table>
<h2>Configuration</h2>
<details><summary>of the run</summary><pre>{{ configuration }}</pre></details>
</body></html>
"""


def all_times(cells: Sequence[Cell]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(model, backend, what was timed, statistics) of everything that was timed."""
    rows = []
    for cell in cells:
        for batch, latency in cell.latency.items():
            parts = {"execution": latency}
            if batch in cell.timings:
                parts = {kind: part for kind, part in cell.timings[batch].items() if isinstance(part, dict)}
            rows += [(cell.model, cell.backend, kind.replace("_", " "), part) for kind, part in parts.items()]
    return rows


def render_page(
    cells: Sequence[Cell],
    table: Table,
    header: Mapping[str, Any],
    title: str,
    warnings: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> str:
    """The page's HTML; `header` says what made the numbers, as in compare.json."""
    import jinja2
    import yaml

    return (
        jinja2.Environment(autoescape=True)
        .from_string(_TEMPLATE)
        .render(
            title=title,
            cells=cells,
            table=table,
            legend=LEGEND,
            floats=(FP32, FP16),
            warnings=warnings,
            problems=problems,
            environment=header["environment"],
            device=header["device"],
            svg=draw_svg(cells, header["measuring"]["batches"]),
            times=all_times(cells),
            configuration=yaml.safe_dump(header["config"], sort_keys=False),
        )
    )


def write_page(path: Path, text: str) -> None:
    """Write the page, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
