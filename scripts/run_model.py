#!/usr/bin/env python
"""Run an ONNX file or an engine on a folder, and compare: with expected outputs, or with another file or engine.

    python scripts/run_model.py --onnx model.onnx --inputs resnet50/        # test_data_set_*/input_0.pb, output_0.pb
    python scripts/run_model.py --engine model.engine --inputs photos/ --saveOutputs outputs/
    python scripts/run_model.py --engine model.engine --inputs photos/ --compare model.onnx --min-sqnr 20

The folder holds ONNX test data sets, or samples without batch axis: images, .npy files, or .npz files with an array for
each input. Samples run in batches; a partial last batch is filled up, and what comes of the filling is dropped. ONNX
files run on ONNX Runtime, literally.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from qat.cli.engine_options import add_engine_options, open_engine
from qat.errors import QatError, RunnerError
from qat.files import atomic_write
from qat.report import format_table
from qat.runtime import OnnxRuntimeRunner, fixed_batch, run_in_batches, run_padded
from qat.runtime.data import holds_test_sets, load_test_sets, verify
from qat.runtime.folder import FolderBatch, ImagePreprocessing, folder_batches, sample_files
from qat.runtime.runner import Arrays
from qat.runtime.summary import OutputSummary, summarize_outputs
from qat.tensorrt import TensorRTRunner

Model = OnnxRuntimeRunner | TensorRTRunner


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--onnx", metavar="FILE", help="ONNX file, for ONNX Runtime on the CPU")
    model.add_argument("--engine", "--loadEngine", metavar="FILE", help="TensorRT engine")
    add("--inputs", "--loadInputs", required=True, metavar="FOLDER", help="test data sets, images, .npy or .npz")
    add("--batch", type=int, default=32, help="samples a batch, where the model leaves it open")
    add("--saveOutputs", metavar="FOLDER", help="one .npz a sample")
    add("--compare", metavar="FILE", help="another ONNX file or engine to run on the same samples")
    add("--min-sqnr", type=float, metavar="DB", help="with --compare: fail where an output is further off")
    add("--rtol", type=float, default=1e-3, help="test data sets: relative tolerance")
    add("--atol", type=float, default=1e-3, help="test data sets: absolute tolerance")
    add("--mean", type=parse_numbers, default=(0.485, 0.456, 0.406), metavar="R,G,B", help="of images in [0, 1]")
    add("--std", type=parse_numbers, default=(0.229, 0.224, 0.225), metavar="R,G,B", help="of images in [0, 1]")
    add("--resize", type=int, metavar="PIXELS", help="shorter edge before the centre crop; default: size / 0.875")
    add("--size", type=int, metavar="PIXELS", help="side of the input, where the model leaves it open")
    add("--useCudaGraph", action="store_true", help="TensorRT: replay CUDA graphs")
    add_engine_options(parser)
    return parser


def parse_numbers(text: str) -> tuple[float, ...]:
    """Numbers from `0.5,0.5,0.5`."""
    return tuple(float(number) for number in text.split(","))


def open_model(path: str, args: argparse.Namespace) -> Model:
    """A runner by the file's suffix."""
    if path.endswith(".onnx"):
        return OnnxRuntimeRunner(path)
    return open_engine(path, args, args.useCudaGraph)


def run_test_sets(model: Model, args: argparse.Namespace) -> None:
    """Compare with output_*.pb; RunnerError where a set differs."""
    if args.compare or args.saveOutputs or args.min_sqnr is not None:
        raise RunnerError("--compare, --min-sqnr and --saveOutputs are for samples; test data sets have their outputs.")
    sets = load_test_sets(args.inputs, model.input_names, model.output_names)
    if bare := [item.name for item in sets if not item.outputs]:
        raise RunnerError(f"The test data sets {bare} in '{args.inputs}' have no output_0.pb to compare with.")
    found = verify(model, sets, args.rtol, args.atol)
    wrong = [f"{name}: {problem}" for name, problems in found.items() for problem in problems]
    if wrong:
        raise RunnerError("Outputs differ from the test data:\n" + "\n".join(wrong))
    print(f"{len(found)} test data sets agree within rtol {args.rtol:g}, atol {args.atol:g}")


def run_folder(model: Model, other: Model | None, args: argparse.Namespace) -> None:
    """Run every sample, write what comes out, and print the summary; RunnerError below --min-sqnr."""
    total = len(sample_files(Path(args.inputs)))
    how = ImagePreprocessing(args.mean, args.std, args.resize, args.size)
    size = batch_size(model, args.batch, total)
    summaries: dict[str, OutputSummary] = {}
    with tqdm(total=total, desc="run", leave=False) as bar:
        for batch in folder_batches(args.inputs, model.inputs, size, how):
            outputs = run_padded(model, batch.arrays, size)
            summarize_outputs(summaries, outputs, run_other(other, batch.arrays, size) if other else None)
            if args.saveOutputs:
                save(Path(args.saveOutputs), batch, outputs)
            bar.update(len(batch.names))
    columns = ["output", "shape", "min", "max"] + (["max difference", "SQNR dB", "same top-1 %"] if other else [])
    title = f"{total} samples of {args.inputs}" + (f" against {args.compare}" if other else "")
    print(format_table(title, columns, [[name, *s.row(other is not None)] for name, s in summaries.items()]))
    if args.min_sqnr is not None:
        low = [f"'{name}' {s.sqnr.db:.1f} dB" for name, s in summaries.items() if s.sqnr.db < args.min_sqnr]
        if low:
            raise RunnerError(f"Below --min-sqnr {args.min_sqnr:g}: {', '.join(low)}.")


def batch_size(model: Model, wanted: int, total: int) -> int:
    """The batch that the model fixes, else the one asked for, but not more than there are samples."""
    return fixed_batch(model) or min(wanted, total)


def run_other(model: Model, arrays: Arrays, size: int) -> Arrays:
    """Run a model on arrays made for another one: of another floating type perhaps, in batches of its own size."""
    types = {spec.name: np.dtype(spec.dtype) for spec in model.inputs}
    cast = {
        n: a.astype(types[n]) if n in types and {a.dtype.kind, types[n].kind} == {"f"} else a for n, a in arrays.items()
    }
    return run_in_batches(model, cast, batch_size(model, size, size), pad_last=True)


def save(folder: Path, batch: FolderBatch, outputs: Arrays) -> None:
    """One .npz a sample."""
    for index, name in enumerate(batch.names):
        target = folder / f"{name}.npz"
        with atomic_write(target) as temporary, temporary.open("wb") as file:
            np.savez(file, **{output: array[index] for output, array in outputs.items()})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 for an error or outputs that differ."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.min_sqnr is not None and not args.compare and not holds_test_sets(args.inputs):
        parser.error("--min-sqnr needs --compare FILE")
    try:
        model = open_model(args.onnx or args.engine, args)
        if holds_test_sets(args.inputs):
            run_test_sets(model, args)
        else:
            run_folder(model, open_model(args.compare, args) if args.compare else None, args)
    except (QatError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
