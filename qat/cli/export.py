"""Write a torch model with a quantized checkpoint as a Q/DQ ONNX file, compared with torch.

    qat export --torch mypackage.models:make --checkpoint qat.pt --shapes input:2x3x224x224 --output model.onnx
    qat export --torch mypackage.models:make --checkpoint qat.pt --shapes input:2x3x224x224 --output model.onnx \\
        --placement modules --precision fp16

The function returns the float model; --placement must be the one that the checkpoint was calibrated with. TensorRT runs
what is not INT8 in the type that the file gives it: --precision. The comparison runs on random inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import qat
from qat.cli.torch_model import make_torch
from qat.errors import RunnerError
from qat.onnx.exporter import PRECISIONS
from qat.runtime.data import random_inputs
from qat.state_dict import load_weights, read_checkpoint
from qat.tensorrt import parse_shapes


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--torch", required=True, metavar="MODULE:CALLABLE", help="function that returns the model")
    add("--checkpoint", metavar="FILE", help="state dict with weights and amax; none if the model has them already")
    add("--shapes", required=True, metavar="name:AxBxC,...", help="input shapes, in the order of the arguments")
    add("--output", required=True, metavar="FILE", help="ONNX file to write")
    add(
        "--placement",
        choices=("traced", "modules", "none"),
        default="traced",
        help="traced: qat.prepare; modules: qat.quantize_; none: the function returns a quantized model",
    )
    add("--include", nargs="+", metavar="GLOB", help="layers to quantize")
    add("--exclude", nargs="+", default=[], metavar="GLOB", help="layers left float")
    add("--opset", type=int, default=21, help="13 or more")
    add("--precision", choices=list(PRECISIONS), default="fp32", help="type of all that is not INT8")
    add("--fixed-batch", action="store_true", help="dimension 0 of every input is fixed")
    add("--float-weights", action="store_true", help="weights stored as floats before a QuantizeLinear")
    return parser


def make_model(options: argparse.Namespace, example: tuple[Tensor, ...]) -> nn.Module:
    """The quantized model in evaluation mode, with the checkpoint loaded.

    Raises:
        RunnerError: the function returns no module.
        ConfigError: the checkpoint cannot be read or does not fit.
    """
    model = make_torch(options.torch)
    if not isinstance(model, nn.Module):
        raise RunnerError(f"--torch {options.torch} returned {type(model).__name__}, not a torch.nn.Module.")
    model.eval()
    if options.placement == "traced":
        qat.prepare(model, example, include=options.include, exclude=options.exclude)
    elif options.placement == "modules":
        qat.quantize_(model, include=options.include, exclude=options.exclude)
    if options.checkpoint:
        load_weights(model, read_checkpoint(options.checkpoint), options.checkpoint)
    return model


def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Exit status 0."""
    options = make_parser(prog).parse_args(args)
    shapes = parse_shapes(options.shapes)
    arrays = random_inputs(shapes, dict.fromkeys(shapes, "float32"))
    example = tuple(torch.from_numpy(array) for array in arrays.values())
    report = qat.export(
        make_model(options, example),
        example,
        options.output,
        opset=options.opset,
        precision=options.precision,
        dynamic_batch=not options.fixed_batch,
        int8_weights=not options.float_weights,
        input_names=list(shapes),
    )
    print(f"{report.path}: {report.size / 2**20:.1f} MiB, opset {report.opset}, {len(report.quantized)} quantizers")
    for name, reason in report.passthrough.items():
        print(f"  float: {name}: {reason}")
    return 0
