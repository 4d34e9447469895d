#!/usr/bin/env python
"""Prepare, calibrate, export and check every torchvision network and many of timm's, with random weights.

    python scripts/sweep_models.py                          # all; a second run continues where the first one ended
    python scripts/sweep_models.py --only 'torchvision/resnet*' timm/convnext_atto
    python scripts/sweep_models.py --retry --jobs 2         # again those that failed, two at a time
    python scripts/sweep_models.py --results runs/sweep.json   # all of them anew

Each network has its own process and a time limit, and after each the table in results/sweep.json is written anew. A row
holds what is quantized, what is float by reason, the comparison with ONNX Runtime, the linter's findings, the most
memory that was needed, the commit, and for a failure its stage and cause. Two batches calibrate; the file has a
dynamic batch. The largest networks need some 12 GiB and run one at a time, after the others.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from _common import run_main
from qat.files import write_json
from qat.report import environment
from sweep_list import ALONE, SIZES, SLOW, TIMM

NOT_RUN: dict[str, Any] = {"passed": False, "stage": "not run", "cause": "not run for lack of time"}
RESULTS = Path(__file__).resolve().parents[1] / "results" / "sweep.json"


def main(args: list[str]) -> int:
    """Exit status 0 where every network passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="names such as torchvision/resnet18")
    parser.add_argument("--results", type=Path, default=RESULTS, help="table to write and to continue")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="limit for one network")
    parser.add_argument("--retry", action="store_true", help="run networks again that failed before")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="networks at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.one:
        print(json.dumps(run_network(options.one)))
        return 0
    rows = json.loads(options.results.read_text())["networks"] if options.results.exists() else {}
    chosen = [name for name in all_names() if any(fnmatch.fnmatchcase(name, glob) for glob in options.only)]
    due = [name for name in chosen if not settled(rows.get(name, NOT_RUN), options.retry)]
    facts = environment()  # before the table, which git may follow, is changed
    alone = [name for name in due if any(fnmatch.fnmatchcase(name, glob) for glob in ALONE)]
    for names, jobs in (([name for name in due if name not in alone], options.jobs), (alone, 1)):
        for name, row in results(names, jobs, options.timeout):
            rows[name] = {**row, "commit": facts["commit"]}
            print(f"{name:45} {'passed' if row['passed'] else row['cause'][:150]}", flush=True)
            write_json(options.results, table(rows, facts))
    write_json(options.results, table(rows, facts))
    failed = [name for name in chosen if not rows[name]["passed"]]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} passed; the table is in {options.results}")
    return 1 if failed else 0


def results(names: list[str], jobs: int, timeout: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows as they come, `jobs` networks at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(in_own_process, name, timeout): name for name in names}
        for done in as_completed(running):
            yield running[done], done.result()


def settled(row: dict[str, Any], retry: bool) -> bool:
    """Whether a network need not run (again)."""
    return bool(row["passed"]) or (row["stage"] != "not run" and not retry)


def table(rows: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """The file's content: counts, hardware and versions, and a row for every network of the list, run or not."""
    networks = {name: rows.get(name, NOT_RUN) for name in sorted({*all_names(), *rows})}
    stages = Counter("passed" if row["passed"] else row["stage"] for row in networks.values())
    return {"counts": dict(stages.most_common()), "environment": facts, "networks": networks}


def all_names() -> list[str]:
    """torchvision's classification and segmentation networks, then the chosen ones of timm; the slow ones last."""
    import torchvision

    modules = (torchvision.models, torchvision.models.segmentation)
    names = [f"torchvision/{name}" for m in modules for name in torchvision.models.list_models(m)]
    names += [f"timm/{name}" for name in TIMM]
    return sorted(names, key=lambda name: next((n for n, glob in enumerate(SLOW, 1) if fnmatch.fnmatch(name, glob)), 0))


def in_own_process(name: str, timeout: float) -> dict[str, Any]:
    """The row of one network; a crash or a time-out becomes a row too."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ, check=False)
    except subprocess.TimeoutExpired:
        return {"passed": False, "stage": "timeout", "cause": f"not done within {timeout:.0f} s"}
    try:
        row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        row = {"passed": False, **_died(done)}
    return {**row, "seconds": round(time.perf_counter() - started, 1)}


def _died(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Stage and cause of a process that ended without a row."""
    if done.returncode == -signal.SIGKILL:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        cause = f"killed by the system, which does that when memory runs out; this machine has {total:.0f} GiB"
        return {"stage": "memory", "cause": cause}
    tail = " ".join(done.stderr.split())[-300:]
    return {"stage": "crash", "cause": f"exit code {done.returncode}: {tail}"}


def run_network(name: str) -> dict[str, Any]:
    """Everything for one network; the first stage that fails ends it and is named."""
    row: dict[str, Any] = {"passed": False}
    warnings.simplefilter("ignore")
    state: dict[str, Any] = {"name": name, "row": row}
    for stage in (build, prepare, calibrate, export):
        started = time.perf_counter()
        try:
            stage(state)
        except Exception as error:
            cause = " ".join(str(error).split())[:500]
            return {**row, "stage": stage.__name__, "cause": f"{type(error).__name__}: {cause}"}
        row[f"{stage.__name__}_seconds"] = round(time.perf_counter() - started, 2)
        row["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    findings = row["lint"]
    if findings:
        return {**row, "stage": "lint", "cause": "; ".join(f"{n} x {rule}" for rule, n in findings.items())}
    return {**row, "passed": True}


def build(state: dict[str, Any]) -> None:
    """The network with random weights that keep activations in range, and two batches of two images."""
    import torch

    torch.manual_seed(0)
    library, _, name = state["name"].partition("/")
    size = next((s for glob, s in SIZES.items() if fnmatch.fnmatchcase(state["name"], glob)), 64)
    model = _torchvision(name, size) if library == "torchvision" else _timm(name, size)
    state["model"] = model.eval()
    channels = 3
    state["batches"] = [torch.randn(2, channels, size, size) for _ in range(2)]
    state["row"]["image_size"] = size
    state["row"]["parameters"] = sum(p.numel() for p in model.parameters())


def _torchvision(name: str, size: int) -> Any:
    import torchvision

    segmentation = name in torchvision.models.list_models(torchvision.models.segmentation)
    options: dict[str, Any] = {"weights_backbone": None} if segmentation else {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if name.startswith("vit_"):
        options["image_size"] = size
    return torchvision.models.get_model(name, weights=None, **options)


def _timm(name: str, size: int) -> Any:
    import timm

    try:
        return timm.create_model(name, pretrained=False, img_size=size)
    except TypeError:  # convolutional networks take any size and know no such argument
        return timm.create_model(name, pretrained=False)


def prepare(state: dict[str, Any]) -> None:
    """Placement; passing through must change nothing."""
    import torch

    import qat
    from qat.onnx.inputs import tensors_in
    from qat.placement import prepare as place

    model, x = state["model"], state["batches"][0]
    with torch.no_grad():
        before = list(tensors_in(model(x)))
        keys = set(model.state_dict())
        place(model, x)
        qat.set_quantizer_state(model, qat.QuantizerState.PASSTHROUGH)
        after = list(tensors_in(model(x)))
    qat.set_quantizer_state(model, qat.QuantizerState.QUANTIZING)
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise AssertionError("the outputs change although every quantizer passes through")
    if not keys <= set(model.state_dict()):
        raise AssertionError("state-dict keys are gone")
    found = qat.summary(model)
    state["row"].update(
        quantizers=len(found.quantizers),
        shared=sum(len(row.shared_by) > 1 for row in found.quantizers),
        left_float=dict(Counter(found.left_float.values()).most_common()),
        notes=found.notes,
    )


def calibrate(state: dict[str, Any]) -> None:
    """Two batches, maximum."""
    import qat

    report = qat.calibrate(state["model"], state["batches"], progress=False)
    state["row"]["dead"] = len(report.dead)


def export(state: dict[str, Any]) -> None:
    """File with a dynamic batch, compared with ONNX Runtime and linted."""
    import qat
    from qat.onnx.lint import Severity, lint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        report = qat.export(state["model"], state["batches"][0], path)
        findings = lint(path).at_least(Severity.WARNING)
    assert report.parity is not None
    state["row"].update(
        bytes=report.size,
        unused=list(report.unused),
        worst_layer=max((layer.relative for layer in report.parity.layers), default=0.0),
        unmatched=list(report.parity.unmatched),
        outputs={o.name: {"max_abs": o.max_abs, "sqnr_db": _finite(o.sqnr_db)} for o in report.parity.outputs},
        lint=dict(Counter(finding.rule for finding in findings)),
    )


def _finite(value: float) -> float | None:
    return round(value, 1) if value < 1e9 else None


if __name__ == "__main__":
    run_main(main)
