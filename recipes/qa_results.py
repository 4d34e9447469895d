"""A question-answering run's results: one JSON, one table; engines, and the speed of the files on this CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from qat.report import format_table
from qat.runtime import OnnxRuntimeRunner
from qat.runtime.latency import measure_runner
from qat.runtime.runner import Arrays
from qat.tensorrt import Layer, OnnxGraph, Profile, ShapeRange
from recipes.engines import build_for_run, built_entry
from recipes.qa_config import QaConfig
from recipes.question_answering import DISTILLED, PLAIN, QuestionAnswering
from recipes.results import Results, label, spread


def rows(results: Results) -> list[tuple[str, list[dict[str, float]]]]:
    """(name, metrics of each seed) for float, each PTQ method, QAT with and without distillation and ONNX."""
    found = [("float", [results["float"]])] if "float" in results else []
    found += [(f"PTQ {entry['method']}", [entry["metrics"]]) for entry in results.get("ptq", [])]
    for variant in (PLAIN, DISTILLED):
        runs = [entry["metrics"] for entry in results.get("qat", []) if entry["variant"] == variant]
        found += [(variant, runs)] if runs else []
    if "onnx" in results:
        entries = results["onnx"]
        found.append((f"ONNX Runtime ({entries[0]['variant']})", [entry["metrics"] for entry in entries]))
    return found


def exported_f1(results: Results) -> tuple[float, float]:
    """F1 of the exported models, mean over their seeds: in torch, and in ONNX Runtime."""
    torch_f1 = {(entry["variant"], entry["seed"]): entry["metrics"]["f1"] for entry in results["qat"]}
    files = results["onnx"]
    return mean(torch_f1[entry["variant"], entry["seed"]] for entry in files), mean(e["metrics"]["f1"] for e in files)


def table(results: Results) -> str:
    """Exact match and F1 of every model, and F1's distance to float; several seeds as mean and standard deviation."""
    base = results["float"]["f1"]
    lines = []
    for name, runs in rows(results):
        cells = [spread([run[key] for run in runs]) for key in ("exact", "f1")]
        lines.append([label(name, runs), *cells, f"{mean(run['f1'] for run in runs) - base:+.2f}"])
    config = results["config"]
    title = f"{config['model']['name']} on {config['data']['name']}, {results['device']}"
    return format_table(title, ["model", "exact match %", "F1 %", "F1 vs float"], lines)


def profiles(config: QaConfig, names: Sequence[str]) -> tuple[Profile, ...]:
    """One profile for each sequence length and batch size, from a single sequence to the whole batch."""
    return tuple(
        {name: ShapeRange((1, length), (batch, length), (batch, length)) for name in names}
        for length in config.engine_lengths
        for batch in config.tensorrt.batches
    )


def engine_entry(run: QuestionAnswering, path: Path) -> dict[str, Any]:
    """Build the engine of an ONNX file: the results' "tensorrt" entry, or {"skipped": why}.

    "kernels" counts all of them in all profiles, "fused_attention" those that are a whole attention; "quantized" is the
    number of matrix products that carry Q/DQ, "lost" names those of them that do not run in INT8 in every profile.

    Raises:
        EngineError: as for `recipes.engines.build_for_run`.
    """
    shapes = profiles(run.config, run.data.names)
    built = build_for_run(run.config, path, shapes)
    if isinstance(built, str):
        return {"skipped": built}
    inspection = built[0].inspection
    kept = {key: value for key, value in built_entry(run.config, *built).items() if key != "not_int8"}
    graph = OnnxGraph.load(built[1])
    quantized = graph.quantized_nodes
    float_operations = [op.node for op in inspection.float_operations]
    return {
        **kept,
        "quantized": len(quantized),
        "lost": [node for node in float_operations if node in quantized],
        **_kernels(inspection.layers),
        "profiles": [
            {
                "batch": shape["input_ids"].max[0],
                "length": shape["input_ids"].max[1],
                **_kernels([layer for layer in inspection.layers if layer.profile == number]),
            }
            for number, shape in enumerate(shapes)
        ],
        "float_operations": float_operations,
    }


def _kernels(layers: Sequence[Layer]) -> dict[str, int]:
    fused = [layer for layer in layers if "mha" in f"{layer.name} {layer.kind}".lower()]
    return {
        "kernels": len(layers),
        "fused_attention": len(fused),
        "fused_attention_int8": sum(layer.precision == "int8" for layer in fused),
    }


def cpu_speed(run: QuestionAnswering, files: dict[str, Path], iterations: int = 20) -> list[dict[str, Any]]:
    """Milliseconds of ONNX files in ONNX Runtime on this CPU, in its fast mode; says nothing about TensorRT."""
    found = []
    for kind, path in files.items():
        runner = OnnxRuntimeRunner(path, reference=False)
        for length in run.config.engine_lengths:
            latency = measure_runner(runner, full_sequences(run, 1, length), warmup=3, iterations=iterations)
            found.append({"file": kind, "length": length, "batch": 1, "median_ms": latency.median_ms})
    return found


def full_sequences(run: QuestionAnswering, batch: int, length: int) -> Arrays:
    """Inputs (batch, length) without padding, for measuring speed."""
    arrays = {
        name: tensor.numpy()
        for name, tensor in run.data.batch(run.data.dev_windows[:1], run.config.data.max_length).items()
    }
    full: Arrays = {name: array[:, :1].repeat(length, 1).repeat(batch, 0) for name, array in arrays.items()}
    return full


def speed_table(entries: Sequence[dict[str, Any]]) -> str:
    """`cpu_speed` as text."""
    lines = [[e["file"], str(e["length"]), str(e["batch"]), f"{e['median_ms']:.2f}"] for e in entries]
    return format_table("ONNX Runtime on this CPU, not TensorRT", ["file", "sequence", "batch", "median ms"], lines)
