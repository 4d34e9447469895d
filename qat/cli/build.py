"""Build a TensorRT engine from an ONNX file, or reuse it, and say what runs in INT8.

    qat build --onnx model.onnx --saveEngine model.engine \\
        --minShapes input:1x3x224x224 --optShapes input:8x3x224x224 --maxShapes input:32x3x224x224 --min-int8 90

Options are named as in trtexec. Each --minShapes/--optShapes/--maxShapes triple makes one optimization profile.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from qat.cli.engine_options import parse_size
from qat.errors import EngineError, QatError
from qat.files import write_json
from qat.onnx.lint import Severity, lint
from qat.tensorrt import BuildOptions, OnnxGraph, build_or_reuse, inspect_layers, load_engine, load_library
from qat.tensorrt.inspection import describe
from qat.tensorrt.page import write_page
from qat.tensorrt.profiles import make_profiles
from qat.tensorrt.store import StoredEngine

_COMPATIBILITY = {"none": "none", "ampere+": "ampere_plus", "sameComputeCapability": "same_compute_capability"}


def parse_workspace(text: str) -> int:
    """Bytes from trtexec's `workspace:SIZE`; SIZE in MiB, or with B, K, M or G."""
    return parse_size(text.removeprefix("workspace:"), unit="M")


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--onnx", required=True, help="ONNX file")
    add("--saveEngine", "--engine", required=True, metavar="FILE", help="engine file; its manifest is FILE.json")
    for kind in ("min", "opt", "max"):
        add(f"--{kind}Shapes", action="append", default=[], metavar="name:AxBxC,...", help="once for each profile")
    add("--library", choices=("tensorrt", "tensorrt_rtx"), help="default: the first installed")
    add("--memPoolSize", "--workspace", type=parse_workspace, metavar="workspace:SIZE", help="scratch memory limit")
    add("--builderOptimizationLevel", type=int, choices=range(6), help="0 builds fast, 5 runs fast")
    add("--timingCacheFile", metavar="FILE", help="version and GPU are added to its name")
    add("--hardwareCompatibilityLevel", choices=list(_COMPATIBILITY), default="none", help="costs speed")
    add("--versionCompatible", action="store_true", help="costs size and speed")
    add("--computeCapabilities", default="", metavar="8.9,12.0", help="targets, for tensorrt_rtx")
    add("--allowWeightStreaming", action="store_true", help="for models larger than the GPU's memory; costs latency")
    add("--refit", action="store_true", help="replaceable weights; INT8 layers may lose fusions")
    add("--noTF32", action="store_true", help="no TF32 in float32 layers")
    add("--sparsity", choices=("disable", "enable"), default="disable", help="2:4 sparse kernels")
    add("--maxAuxStreams", type=int, help="streams inside the engine")
    add("--rebuild", action="store_true", help="build even if nothing changed")
    add("--min-int8", type=float, metavar="PERCENT", help="fail below this share of INT8 operations")
    add("--exportLayerInfo", metavar="FILE", help="JSON with coverage, layers and causes")
    add("--html", metavar="FILE", help="page with the graph coloured by precision")
    add("--quiet", action="store_true", help="no progress bar")
    add("--verbose", action="store_true", help="TensorRT's whole log")
    return parser


def make_options(args: argparse.Namespace) -> BuildOptions:
    """BuildOptions from the command line."""
    return BuildOptions(
        profiles=tuple(make_profiles(args.minShapes, args.optShapes, args.maxShapes)),
        workspace_bytes=args.memPoolSize,
        optimization_level=args.builderOptimizationLevel,
        compute_capabilities=tuple(filter(None, args.computeCapabilities.split(","))),
        hardware_compatibility=_COMPATIBILITY[args.hardwareCompatibilityLevel],
        version_compatible=args.versionCompatible,
        weight_streaming=args.allowWeightStreaming,
        refit=args.refit,
        tf32=not args.noTF32,
        sparse_weights=args.sparsity == "enable",
        max_aux_streams=args.maxAuxStreams,
    )


def warn(path: str) -> None:
    """Print what TensorRT built without a word although it computes other numbers than the file says."""
    try:
        found = lint(path).at_least(Severity.ERROR)
    except QatError as error:
        print(f"warning: the linter cannot read what TensorRT built: {error}", file=sys.stderr)
        return
    for finding in found:
        print(f"warning: {finding}", file=sys.stderr)


def report(args: argparse.Namespace, stored: StoredEngine) -> None:
    """Print coverage, write the files asked for, and enforce --min-int8."""
    library = load_library(args.library)
    layers = stored.layers
    if not layers:
        try:
            layers = tuple(load_engine(stored.path, library).layers())
        except EngineError as error:
            if args.min_int8 is not None or args.html or args.exportLayerInfo:
                raise
            print(f"No layer information: {error}")
            return
    inspection = inspect_layers(layers, OnnxGraph.load(args.onnx))
    print(
        f"INT8: {inspection.int8_coverage:.1f} % ({len(inspection.int8_operations)} of {len(inspection.operations)} "
        f"weighted operations), {len(inspection.reformats)} reformats, {len(inspection.standalone_qdq)} standalone Q/DQ"
    )
    for op in inspection.float_operations:
        print(f"  {describe(op)}")
    if args.exportLayerInfo:
        details = {"summary": inspection.summary(), "layers": [layer.to_dict() for layer in inspection.layers]}
        write_json(args.exportLayerInfo, details)
    if args.html:
        write_page(inspection, str(stored.path), args.html)
    if args.min_int8 is not None:
        inspection.require_int8(args.min_int8)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Exit status: 0, 1 for an error, 130 after Ctrl-C."""
    args = make_parser(prog).parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("qat").setLevel(logging.DEBUG if args.verbose else logging.WARNING)
    try:
        stored = build_or_reuse(
            args.onnx,
            args.saveEngine,
            make_options(args),
            library=load_library(args.library),
            timing_cache=args.timingCacheFile,
            show_progress=not args.quiet,
            force=args.rebuild,
        )
        size = stored.manifest["engine_bytes"] / 2**20
        how = "reused" if stored.reused else f"built in {stored.manifest['build_seconds']:.1f} s ({stored.why_built})"
        print(f"{stored.path}: {size:.1f} MiB, {how}")
        if not stored.reused:
            warn(args.onnx)
        report(args, stored)
    except QatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the old engine, if there was one, is untouched", file=sys.stderr)
        return 130
    return 0
