#!/usr/bin/env python
"""What TensorRT for RTX makes of three placements of quantizers, read from its build log; no GPU is needed.

    python benchmarks/placement_rtx.py --modelopt-python modelopt-env/bin/python    # all, or what is missing
    python benchmarks/placement_rtx.py --only 'resnet50/*' --restart

ResNet-50, EfficientNet-B0, MobileNetV2, DenseNet-121, a U-Net (segmentation-models-pytorch, ResNet-34 encoder) and
ViT-B/16 with random weights, each with the quantizers of `qat.prepare` (traced), `qat.quantize_` (modules) and NVIDIA's
Model Optimizer (modelopt: INT8_DEFAULT_CFG, exported by the helper that its own example uses), with a half-precision
and with a float32 remainder. Each row is exported in a process of its own, built for compute capability 8.9 and counted
(rtx_counts.py). results/placement_rtx.json is written after each row, docs/placement_rtx.png at the end.

Needs `pip install -e '.[tensorrt-rtx,benchmarks]'`. Model Optimizer pins other versions of onnx than we use, so it has
an environment of its own, and its rows are skipped without --modelopt-python:

    python -m venv modelopt-env
    modelopt-env/bin/pip install torch torchvision 'nvidia-modelopt[onnx]' segmentation-models-pytorch requests
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qat.errors import EngineError
from qat.files import write_json
from qat.report import environment
from qat.tensorrt import BuildOptions, OnnxGraph, build_engine, inspect_layers, load_library
from rtx_counts import count
from rtx_export import EXPORTERS
from rtx_networks import CALIBRATION_BATCHES, NETWORKS, SHAPE
from rtx_report import plot, table

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ("fp16", "fp32")
OPTIONS = BuildOptions(compute_capabilities=("8.9",))
SECONDS = 1800
"""Limit for one export."""


def main(args: list[str]) -> int:
    """Exit status 0 where the claim holds: with our placement every network builds and nothing is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modelopt-python", type=Path, metavar="PATH", help="Python that has nvidia-modelopt")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="rows such as unet*/traced/fp16")
    parser.add_argument("--restart", action="store_true", help="forget the rows there are")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "placement_rtx.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "placement_rtx.png")
    options = parser.parse_args(args)
    logging.getLogger("qat.tensorrt").setLevel(logging.CRITICAL)
    report = start(options.results, options.restart)
    names = ["/".join(parts) for parts in itertools.product(NETWORKS, EXPORTERS, PRECISIONS)]
    chosen = [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in options.only)]
    due = [name for name in chosen if name not in report["rows"] or "export_error" in report["rows"][name]]
    for name in (bar := tqdm(due, unit="row")):
        bar.set_postfix_str(name)
        placement = name.split("/")[1]
        python = options.modelopt_python if placement == "modelopt" else Path(sys.executable)
        if python is not None:
            report["rows"][name] = run(name, python)
            write_json(options.results, report)
    rows = {name: report["rows"][name] for name in names if name in report["rows"]}
    print(table(rows))
    plot(options.plot, rows)
    failed = [name for name in chosen if "/traced/" in name and not holds(rows.get(name))]
    print(
        "\n".join(f"FAILED or missing: {name}" for name in failed) or "every layer that carries our Q/DQ runs in INT8"
    )
    return 1 if failed else 0


def start(path: Path, restart: bool) -> dict[str, Any]:
    """The report to continue: that of the same commit and packages, else a new one."""
    library = load_library("tensorrt_rtx")
    now = {
        "environment": environment(),
        "library": f"{library.name} {library.version}",
        "build": {**OPTIONS.fingerprint(), "input": list(SHAPE), "calibration_batches": CALIBRATION_BATCHES},
        "rows": {},
    }
    if path.exists() and not restart:
        before: dict[str, Any] = json.loads(path.read_text())
        if all(_key(before[part]) == _key(now[part]) for part in ("environment", "library", "build")):
            return before
    return now


def _key(part: Any) -> Any:
    """What must be equal: of the environment the commit and the packages."""
    if not isinstance(part, dict) or "commit" not in part:
        return part
    return part["commit"], part["packages"]


def holds(row: dict[str, Any] | None) -> bool:
    """Built, every layer with Q/DQ in INT8, and no residual add requantized in a kernel of its own."""
    return row is not None and "int8" in row and not row["lost"] and not row["requantized_adds"]


def run(name: str, python: Path) -> dict[str, Any]:
    """Export, build and count one row; what refuses the network becomes the row, in its own words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        command = [str(python), str(Path(__file__).with_name("rtx_export.py")), *name.split("/"), str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=os.environ, check=False)
        except subprocess.TimeoutExpired:
            return {"export_error": f"not done within {SECONDS} s"}
        if done.returncode or not path.exists():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return {"export_error": lines[-1][:500]}
        row = {"made_with": json.loads(done.stdout.strip().splitlines()[-1]), "onnx_bytes": path.stat().st_size}
        try:
            built = build_engine(path, OPTIONS, library=load_library("tensorrt_rtx"))
        except EngineError as error:
            return {**row, "refused": " ".join(str(error).replace(str(path), "model.onnx").split())[:1000]}
        graph = OnnxGraph.load(path)
        counts = count(graph, inspect_layers(built.layers, graph))
        return {**row, "engine_bytes": len(built.engine), "build_seconds": round(built.seconds, 2), **counts}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
