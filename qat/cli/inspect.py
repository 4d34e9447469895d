"""Show which layers of an engine run in INT8, which do not and why.

    qat inspect --engine model.engine --onnx model.onnx --html model.html --min-int8 90

Layers come from the engine inspector (a GPU is needed), from the manifest that `qat build` wrote, from the JSON of
`--exportLayerInfo` (trtexec's or `qat build`'s), or from a saved verbose build log of TensorRT for RTX.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from qat.errors import EngineError, QatError
from qat.files import write_json
from qat.tensorrt import (
    Layer,
    OnnxGraph,
    inspect_layers,
    layers_from_inspector,
    layers_from_log,
    load_engine,
    load_library,
    read_manifest,
    write_page,
)
from qat.tensorrt.inspection import describe


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--engine", "--loadEngine", metavar="FILE", help="engine file")
    source.add_argument("--layerInfo", metavar="FILE", help="JSON of --exportLayerInfo")
    source.add_argument("--buildLog", metavar="FILE", help="verbose build log of tensorrt_rtx")
    parser.add_argument("--onnx", metavar="FILE", help="the engine's ONNX file: names nodes, torch modules and causes")
    parser.add_argument("--library", choices=("tensorrt", "tensorrt_rtx"), help="default: the first installed")
    parser.add_argument("--min-int8", type=float, metavar="PERCENT", help="fail below this share of INT8 operations")
    parser.add_argument("--json", metavar="FILE", help="coverage, layers and causes as JSON")
    parser.add_argument("--html", metavar="FILE", help="page with the graph coloured by precision")
    parser.add_argument("--all", action="store_true", help="list INT8 operations too")
    return parser


def read_layer_info(text: str) -> list[Layer]:
    """Layers from the JSON that trtexec, `qat build` or `qat inspect` wrote.

    Raises:
        EngineError: it is none of these.
    """
    try:
        own = json.loads(text).get("layers")
    except (ValueError, AttributeError):
        own = None
    return [Layer.from_dict(values) for values in own] if own else layers_from_inspector(text)


def read_layers(args: argparse.Namespace) -> list[Layer]:
    """Layers from whichever source was named; an engine's manifest spares the GPU."""
    if args.layerInfo:
        return read_layer_info(Path(args.layerInfo).read_text())
    if args.buildLog:
        text = Path(args.buildLog).read_text()
        return layers_from_log([text[text.rfind("Layers:") :]])
    try:
        layers = [Layer.from_dict(values) for values in read_manifest(args.engine)["layers"]]
    except EngineError:
        layers = []
    return layers or load_engine(args.engine, load_library(args.library)).layers()


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Exit status: 0, or 1 for an error or too little INT8."""
    args = make_parser(prog).parse_args(argv)
    try:
        inspection = inspect_layers(read_layers(args), OnnxGraph.load(args.onnx) if args.onnx else None)
        shown = inspection.operations if args.all else inspection.float_operations
        for op in shown:
            print(describe(op))
        print(
            f"INT8: {inspection.int8_coverage:.1f} % ({len(inspection.int8_operations)} of "
            f"{len(inspection.operations)}); {len(inspection.layers)} layers, {len(inspection.reformats)} reformats, "
            f"{len(inspection.standalone_qdq)} standalone Q/DQ"
        )
        if args.json:
            details = {"summary": inspection.summary(), "layers": [layer.to_dict() for layer in inspection.layers]}
            write_json(args.json, details)
        if args.html:
            write_page(inspection, str(args.engine or args.layerInfo or args.buildLog), args.html)
        if args.min_int8 is not None:
            inspection.require_int8(args.min_int8)
    except (QatError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
