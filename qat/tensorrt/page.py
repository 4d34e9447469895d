"""One HTML page for an inspection: coverage, what is not INT8 and why, conversions, and the coloured graph."""

from __future__ import annotations

from pathlib import Path

from qat.files import atomic_write
from qat.tensorrt.graph_svg import COLOURS, layers_svg
from qat.tensorrt.inspection import Inspection

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font-family: sans-serif; margin: 2em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { border: 1px solid #ccc; padding: 3px 8px; text-align: left; font-size: 13px; }
.graph { overflow: auto; max-height: 80vh; border: 1px solid #ccc; }
.key { padding: 2px 8px; margin-right: 6px; border-radius: 4px; }
</style></head><body>
<h1>{{ title }}</h1>
<p><b>{{ "%.1f" | format(inspection.int8_coverage) }} %</b> of the weighted operations run in INT8
({{ inspection.int8_operations | length }} of {{ inspection.operations | length }}) in
{{ inspection.layers | length }} layers; {{ inspection.reformats | length }} reformats,
{{ inspection.standalone_qdq | length }} standalone quantize or dequantize layers.</p>
<h2>Not in INT8</h2>
{% if inspection.float_operations %}
<table><tr><th>ONNX node</th><th>operator</th><th>torch module</th><th>precision</th><th>edge</th><th>cause</th></tr>
{% for op in inspection.float_operations %}<tr><td>{{ op.node }}</td><td>{{ op.op_type }}</td><td>{{ op.module }}</td>
<td style="background: {{ colours.get(op.precision, '#d0d0d0') }}">{{ op.precision }}</td>
<td>{{ op.edge }}</td><td>{{ op.cause }}</td></tr>
{% endfor %}</table>
{% else %}<p>Nothing.</p>{% endif %}
{% for heading, layers in (("Reformats", inspection.reformats), ("Standalone Q/DQ", inspection.standalone_qdq)) %}
<h2>{{ heading }}</h2>
{% if layers %}<table><tr><th>layer</th><th>profile</th><th>ONNX nodes</th></tr>
{% for layer in layers %}<tr><td>{{ layer.name }}</td><td>{{ layer.profile }}</td>
<td>{{ layer.onnx_nodes | join(", ") }}</td></tr>
{% endfor %}</table>{% else %}<p>None.</p>{% endif %}
{% endfor %}
<h2>Layers</h2>
<p>{% for name, colour in colours.items() %}<span class="key" style="background: {{ colour }}">{{ name }}</span>
{% endfor %} thick border: a weighted operation. Hover for names.</p>
{% for profile, svg in graphs %}
<h3>Profile {{ profile }}</h3><div class="graph">{{ svg | safe }}</div>
{% endfor %}
</body></html>
"""


def render_page(inspection: Inspection, title: str) -> str:
    """The page's HTML; self-contained."""
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE)
    profiles = sorted({layer.profile for layer in inspection.layers})
    graphs = [(p, layers_svg([layer for layer in inspection.layers if layer.profile == p])) for p in profiles]
    return template.render(inspection=inspection, title=title, colours=COLOURS, graphs=graphs)


def write_page(inspection: Inspection, title: str, path: str | Path) -> None:
    """Write the page, atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(render_page(inspection, title), encoding="utf-8")
