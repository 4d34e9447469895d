"""Random small networks through prepare, calibrate, export, lint and ONNX Runtime; some through TensorRT for RTX.

    python benchmarks/fuzz.py --cases 10000 --build-every 50 --jobs 2

Case i is drawn from seed + i, so any case can be had again: `--only 123`. A line a case is kept beside the results, and
a run that was stopped does what is left; lines of another machine can be added to that file. results/fuzz.json is
written at the end. Exit status 1 for failures, whose source is in the results: what is repaired becomes a fixed test.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fuzz"))
from fuzz_cases import cached_translations, draw_case, run_case

from journal import add_row, read_rows
from qat.files import write_json
from qat.report import environment

ROOT = Path(__file__).resolve().parents[1]
_PROCESS = ExitStack()


def run_one(seed: int, build: bool) -> dict[str, Any]:
    """What became of one case, as plain values."""
    network, settings = draw_case(random.Random(seed), build)
    start = time.perf_counter()
    try:
        outcome = vars(run_case(network, settings, seed))
        status = "refused" if outcome["refused"] else "passed"
    except Exception as error:
        outcome = {
            "error": f"{type(error).__name__}: {error}"[:2000],
            "settings": vars(settings),
            "source": network.source,
        }
        status = "failed"
    seconds = round(time.perf_counter() - start, 3)
    return {"seed": seed, "status": status, "seconds": seconds, "torch": torch.__version__, "build": build, **outcome}


def prepare_process() -> None:
    """One thread, no warnings, and torch's translations read once, for as long as the process lives."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _PROCESS.enter_context(cached_translations())


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and every failure with its source."""
    built = [row["int8"] for row in rows if row["build"] and row["status"] == "passed"]
    return {
        "cases": len(rows),
        **{status: sum(row["status"] == status for row in rows) for status in ("passed", "refused", "failed")},
        "refused_because": dict(Counter(row["refused"] for row in rows if row["status"] == "refused")),
        "quantizers": sum(row.get("quantizers", 0) for row in rows),
        "linter_warnings": dict(Counter(rule for row in rows for rule in row.get("warnings", []))),
        "engines_built": len(built),
        "torch": dict(Counter(row["torch"] for row in rows)),
        "cpu_seconds": round(sum(row["seconds"] for row in rows)),
        "failures": [row for row in rows if row["status"] == "failed"],
    }


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--build-every", type=int, default=0, metavar="N", help="build each Nth with tensorrt-rtx")
    parser.add_argument("--only", type=int, metavar="SEED", help="run one case, print it and raise what it raises")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "fuzz.json")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if options.only is not None:
        prepare_process()
        network, settings = draw_case(random.Random(options.only))
        print(f"{network.source}\nsample {network.sample}, {settings}")
        print(run_case(network, settings, options.only))
        return 0
    journal = options.output.with_suffix(".jsonl")
    last = options.seed + options.cases
    rows = {row["seed"]: row for row in read_rows(journal) if options.seed <= row["seed"] < last}
    left = [seed for seed in range(options.seed, last) if seed not in rows]
    builds = [bool(options.build_every) and seed % options.build_every == 0 for seed in left]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn, prepare_process) as pool:
        for row in tqdm(pool.map(run_one, left, builds), "fuzz", len(left)):
            rows[row["seed"]] = row
            add_row(journal, row)
    found = summarize([rows[seed] for seed in sorted(rows)])
    command = (
        f"python benchmarks/fuzz.py --cases {options.cases} --seed {options.seed} --build-every {options.build_every}"
    )
    write_json(options.output, {"command": command, "environment": environment(), **found})
    journal.unlink()
    print({key: value for key, value in found.items() if key != "failures"})
    for failure in found["failures"]:
        print(f"seed {failure['seed']}: {failure['error']}")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
