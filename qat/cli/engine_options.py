"""Options of the commands that open engines, named as in trtexec."""

from __future__ import annotations

import argparse
import re

from qat.tensorrt import TensorRTRunner, load_engine, load_library, refit_engine

_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str, unit: str = "B") -> int:
    """Bytes from a number with B, K, M or G, powers of 1024; `unit` counts where there is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([BKMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no size, such as 512M or 2G.")
    return int(float(match.group(1)) * _UNITS[match.group(2) or unit])


def _check_budget(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?%", text):
        parse_size(text)
    return text


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """--library, --weightStreamingBudget and --refitFromOnnx."""
    add = parser.add_argument
    add("--library", choices=("tensorrt", "tensorrt_rtx"), help="default: the first installed")
    add(
        "--weightStreamingBudget",
        type=_check_budget,
        metavar="SIZE|N%",
        help="weights kept on the GPU, of an engine built with --allowWeightStreaming; less is slower",
    )
    add("--refitFromOnnx", metavar="FILE", help="weights for an engine built with --refit")


def open_engine(path: str, args: argparse.Namespace, cuda_graph: bool = False) -> TensorRTRunner:
    """A runner as the options want it.

    Raises:
        EngineError: no GPU, or an engine that cannot be loaded, refitted or streamed.
    """
    loaded = load_engine(path, load_library(args.library))
    if args.refitFromOnnx:
        refit_engine(loaded, args.refitFromOnnx)
    budget = args.weightStreamingBudget
    if budget and budget.endswith("%"):
        budget = str(round(float(budget[:-1]) / 100 * loaded.engine.streamable_weights_size))
    return TensorRTRunner(
        loaded, cuda_graph=cuda_graph, weight_streaming_budget=parse_size(budget) if budget is not None else None
    )
