#!/usr/bin/env python
"""How long `import qat` takes beyond `import torch`, and the export of a ResNet-50; on the CPU.

    OMP_NUM_THREADS=2 python benchmarks/import_and_export.py
    python benchmarks/import_and_export.py --quick           # a ResNet-18, one import

Imports are timed in fresh processes, one of each kind in turn, torch and qat apart, and the median of 5 is taken. The
export is that of a prepared and calibrated ResNet-50 at 224 px with its comparison against ONNX Runtime. Targets: 0.5 s
and 60 s on 2 cores. `--suite-seconds` records the time of the whole test suite, measured apart.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import qat
from timing import arguments, bars, report, show

IMPORT_TARGET, EXPORT_TARGET = 0.5, 60.0
CODE = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import qat
print(middle - begin, time.perf_counter() - middle)
"""


def main(args: list[str]) -> int:
    """Exit status 0 where both targets are met."""
    parser = arguments(__doc__, "import_and_export")
    parser.add_argument("--suite-seconds", type=float, help="how long the whole test suite took, measured apart")
    options = parser.parse_args(args)
    options.device = "cpu"
    rows = [import_row(1 if options.quick else 5), export_row("resnet18" if options.quick else "resnet50")]
    if options.suite_seconds is not None:
        rows.append({"what": "whole test suite", "seconds": options.suite_seconds})
    columns = ("what", "seconds", "target", "torch seconds", "processor seconds")
    show("Imports and export", columns, rows)
    report(options, rows, threads=torch.get_num_threads())
    bars(
        options.plot,
        {row["what"]: {"seconds": row["seconds"]} for row in rows},
        {row["what"]: row["target"] for row in rows if "target" in row},
        "seconds",
    )
    return 0 if all(row["seconds"] < row.get("target", float("inf")) for row in rows) else 1


def import_row(repeats: int) -> dict[str, Any]:
    """What `import qat` adds, the first process left out: it reads the files from disk."""
    runs = []
    for _ in range(repeats + 1):
        run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        runs.append([float(part) for part in run.stdout.split()])
    torch_seconds, qat_seconds = (statistics.median(column) for column in zip(*runs[1:], strict=True))
    return {
        "what": "import qat after torch",
        "seconds": round(qat_seconds, 4),
        "torch seconds": round(torch_seconds, 4),
        "runs": runs,
        "target": IMPORT_TARGET,
    }


def export_row(name: str) -> dict[str, Any]:
    """Seconds to export a prepared network, wall clock and processor."""
    from torchvision.models import get_model

    torch.manual_seed(0)
    model, x = get_model(name).eval(), torch.randn(2, 3, 224, 224)
    qat.prepare(model, x)
    qat.calibrate(model, [x], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        begin, processor = time.perf_counter(), time.process_time()
        qat.export(model, (x,), Path(folder) / "model.onnx")
        taken, used = time.perf_counter() - begin, time.process_time() - processor
        size = (Path(folder) / "model.onnx").stat().st_size
    return {
        "what": f"export of {name}",
        "seconds": round(taken, 2),
        "processor seconds": round(used, 2),
        "target": EXPORT_TARGET,
        "bytes": size,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
