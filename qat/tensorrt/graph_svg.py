"""An engine's layers as an SVG graph, coloured by precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qat.tensorrt.layers import Layer

COLOURS = {"int8": "#7bc67b", "fp8": "#b5d66b", "fp16": "#7fb2e5", "bf16": "#7fb2e5", "fp32": "#f0a35e"}
OTHER_COLOUR = "#d0d0d0"

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 210, 26, 16, 22


@dataclass(frozen=True)
class _Box:
    layer: Layer
    row: int
    column: int

    @property
    def x(self) -> int:
        return self.column * (_WIDTH + _GAP_X) + _GAP_X

    @property
    def y(self) -> int:
        return self.row * (_HEIGHT + _GAP_Y) + _GAP_Y


def layer_edges(layers: Sequence[Layer]) -> list[tuple[int, int, str]]:
    """Pairs (producer, consumer, type of the tensor) of indices into `layers`, by tensor name."""
    producers = {tensor.name: index for index, layer in enumerate(layers) for tensor in layer.outputs}
    return [
        (producers[tensor.name], index, tensor.dtype)
        for index, layer in enumerate(layers)
        for tensor in layer.inputs
        if tensor.name in producers and producers[tensor.name] != index
    ]


def _place(layers: Sequence[Layer], edges: Sequence[tuple[int, int, str]]) -> list[_Box]:
    rows = [0] * len(layers)
    incoming: dict[int, list[int]] = {}
    for source, target, _ in edges:
        if source < target:
            incoming.setdefault(target, []).append(source)
    for index in range(len(layers)):
        rows[index] = 1 + max((rows[source] for source in incoming.get(index, [])), default=-1)
    filled: dict[int, int] = {}
    boxes = []
    for index, layer in enumerate(layers):
        column = filled.get(rows[index], 0)
        filled[rows[index]] = column + 1
        boxes.append(_Box(layer, rows[index], column))
    return boxes


def layers_svg(layers: Sequence[Layer]) -> str:
    """One box a layer, in execution order from top to bottom; INT8 tensors are green lines."""
    edges = layer_edges(layers)
    boxes = _place(layers, edges)
    width = max((box.x for box in boxes), default=0) + _WIDTH + _GAP_X
    height = max((box.y for box in boxes), default=0) + _HEIGHT + _GAP_Y
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="11">']
    for source, target, dtype in edges:
        a, b = boxes[source], boxes[target]
        x1, y1, x2, y2 = a.x + _WIDTH // 2, a.y + _HEIGHT, b.x + _WIDTH // 2, b.y
        colour = COLOURS.get(dtype, OTHER_COLOUR)
        middle = (y1 + y2) // 2
        parts.append(
            f'<path d="M{x1},{y1} C{x1},{middle} {x2},{middle} {x2},{y2}" fill="none" stroke="{colour}" '
            f'stroke-width="2"><title>{escape(dtype)}</title></path>'
        )
    parts.extend(_draw(box) for box in boxes)
    return "\n".join([*parts, "</svg>"])


def _draw(box: _Box) -> str:
    layer = box.layer
    label = layer.onnx_nodes[0] if layer.is_weighted and layer.onnx_nodes else layer.name
    label = label if len(label) <= 32 else f"...{label[-29:]}"
    border = 2 if layer.is_weighted else 0
    lines = [layer.name, f"{layer.kind}, {layer.precision}", *layer.onnx_nodes]
    return (
        f'<g><title>{escape(chr(10).join(lines))}</title><rect x="{box.x}" y="{box.y}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" rx="4" fill="{COLOURS.get(layer.precision, OTHER_COLOUR)}" stroke="#333" '
        f'stroke-width="{border}"/><text x="{box.x + 6}" y="{box.y + 17}">{escape(label)}</text></g>'
    )
