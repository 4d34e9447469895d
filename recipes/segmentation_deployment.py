"""What follows training: the file, reference data, engine, batched inference, times, comparison with the reference."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as v2

import qat
from qat.runtime import OnnxRuntimeRunner, Runner
from qat.runtime.data import load_test_sets, save_test_set
from qat.runtime.latency import measure_runner
from qat.runtime.summary import OutputSummary
from qat.tensorrt import (
    OnnxGraph,
    Profile,
    ShapeRange,
    TensorRTRunner,
    concatenations,
    load_engine,
    measure_engine,
)
from recipes.engines import BuiltEngine, build_for_run, built_entry
from recipes.segmentation import Segmentation, runner_predict
from recipes.segmentation_config import STRIDE, SegmentationConfig
from recipes.segmentation_metrics import to_classes
from recipes.tiling import fill_up, padded_size

TEST_SET = "test_data_set_0"
TIMED_RUNS = {"onnxruntime": (1, 5), "tensorrt": (20, 200)}
"""Runs for warming up, and runs that count."""


@dataclass(frozen=True)
class Backend:
    """What runs the file: a runner, its name, and why it is not TensorRT ("" where it is)."""

    name: str
    runner: Runner
    why: str


def write_reference(run: Segmentation, model: nn.Module, folder: Path) -> Path:
    """Write test_data_set_0 beside the file: a batch of validation patches, and what torch makes of it.

    Returns:
        The folder of the test set.
    """
    size, count = run.config.inference.tile, run.config.inference.batch
    pairs = run.data.val_pairs
    crops = [_corner(pairs[number % len(pairs)].image, size) for number in range(count)]
    images = run.data.normalize(torch.stack(crops).to(run.device)).cpu()
    with torch.no_grad():
        logits = copy.deepcopy(model).cpu().eval()(images)
    save_test_set(folder / TEST_SET, {"input": images.numpy()}, {"output": logits.numpy()})
    return folder / TEST_SET


def _corner(image: Tensor, size: int) -> Tensor:
    return fill_up(image[None].float(), size, size)[0, :, :size, :size]


def make_profiles(config: SegmentationConfig, name: str) -> tuple[Profile, ...]:
    """Two profiles: a whole image of any size up to `inference.whole`, and every batch of tiles up to the batch's."""
    channels, how = config.data.channels, config.inference
    largest = max(padded_size(how.whole), how.tile)

    def shape(batch: int, side: int) -> tuple[int, int, int, int]:
        return (batch, channels, side, side)

    middle = min(padded_size(512), largest)
    whole = ShapeRange(shape(1, STRIDE), shape(1, middle), shape(1, largest))
    tiles = ShapeRange(shape(1, how.tile), shape(how.batch, how.tile), shape(how.batch, how.tile))
    return ({name: whole}, {name: tiles})


def build(run: Segmentation, path: Path) -> tuple[BuiltEngine | None, dict[str, Any]]:
    """The engine of the file, built or reused, and the results' "tensorrt" entry."""
    profiles = make_profiles(run.config, OnnxGraph.load(path).inputs[0])
    built = build_for_run(run.config, path, profiles)
    if isinstance(built, str):
        return None, {"skipped": built}
    engine, file = built
    joined = concatenations(engine.inspection.layers, OnnxGraph.load(file))
    return engine, {
        **built_entry(run.config, engine, file),
        "reused": engine.stored.reused,
        "profiles": len(profiles),
        "concatenations": [each.to_dict() for each in joined],
    }


def concatenations_line(entry: dict[str, Any]) -> str:
    """A sentence about the concatenations of a "tensorrt" entry; empty where there is no engine."""
    joined = entry.get("concatenations", [])
    if not joined:
        return ""
    if any(each["requantized"] is None for each in joined):
        return f"Concatenations: {len(joined)}; this engine does not tell which are requantized."
    again = [each["node"] for each in joined if each["requantized"]]
    return f"Concatenations: {len(joined)}, requantized: {', '.join(again) or 'none'}."


def open_backend(engine: BuiltEngine | None, entry: dict[str, Any], path: Path) -> Backend:
    """TensorRT where it has an engine and can execute it here, else ONNX Runtime on the CPU, literally."""
    if engine is not None and not engine.why_not_run:
        return Backend("TensorRT", TensorRTRunner(load_engine(engine.stored.path, engine.library)), "")
    why = entry.get("skipped") or entry["not_executed"]
    return Backend("ONNX Runtime", OnnxRuntimeRunner(path), why)


def compare_with_reference(runner: Runner, folder: Path) -> dict[str, Any]:
    """Largest difference and SQNR of the logits, and the percent of the pixels that get the same class.

    A quantized model agrees with torch bit for bit between its quantizers only: a value at a rounding boundary flips,
    and flips travel. So this is no pass or fail; `check_sizes` is.
    """
    test = load_test_sets(folder, runner.input_names, runner.output_names)[0]
    (name, expected), *_ = test.outputs.items()
    actual = runner.run(test.inputs)[name]
    return {"shape": list(expected.shape), **_agreement(torch.tensor(actual), torch.tensor(expected))}


def _agreement(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """Of logits (N, K, H, W): largest difference, SQNR, and the percent of the pixels that get the same class."""
    summary = OutputSummary()
    summary.add(actual.numpy(), expected.numpy())
    same = to_classes(actual) == to_classes(expected)
    return {
        "largest_difference": summary.difference,
        "sqnr_db": round(summary.sqnr.db, 2),
        "same_pixels_percent": 100 * float(same.double().mean()),
    }


def check_sizes(run: Segmentation, model: nn.Module, path: Path, images: dict[str, Tensor]) -> list[dict[str, Any]]:
    """`qat.check_parity` of the file on images of other sizes than it was exported with, and how far outputs agree.

    Args:
        run: for the normalization.
        model: what the file was made from.
        path: the file.
        images: uint8, shape (C, H, W), sides multiples of 32, by name.

    Returns:
        For each: its size, codes that differ and the largest relative difference between quantizers; from end to end,
        how the file agrees with torch, and how torch agrees with itself in another memory format (channels-last): where
        the file is right, flips at rounding boundaries part the two pairs alike.
    """
    on_cpu = copy.deepcopy(model).cpu().to(memory_format=torch.contiguous_format).eval()
    other = copy.deepcopy(on_cpu).to(memory_format=torch.channels_last)
    predict = runner_predict(OnnxRuntimeRunner(path))
    found = []
    for name, image in images.items():
        batch = run.data.normalize(image[None].to(run.device)).cpu()
        report = qat.check_parity(on_cpu, path, [batch], per_layer=True)
        with torch.no_grad():
            expected, again = on_cpu(batch), other(batch.contiguous(memory_format=torch.channels_last))
        found.append(
            {
                "image": name,
                "size": f"{image.shape[2]}x{image.shape[1]}",
                "passed": report.passed,
                "codes_that_differ": sum(row.mismatched for row in report.layers),
                "largest_relative_difference": max(row.relative for row in report.layers),
                "end_to_end": _agreement(predict(batch), expected),
                "torch_with_itself": _agreement(again.contiguous(), expected),
            }
        )
    return found


def photograph(channels: int) -> Tensor:
    """A photograph that comes with scikit-learn, 1024x768; uint8, shape (channels, 768, 1024)."""
    pixels = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    resized: Tensor = v2.resize(pixels, [768, 1024], antialias=True)
    return resized if channels == 3 else v2.rgb_to_grayscale(resized)


def measure(backend: Backend, folder: Path) -> dict[str, Any]:
    """Times of the reference batch, of all of it and of its first image.

    TensorRT by CUDA events, alone, with copies and as a CUDA graph; ONNX Runtime by the clock, which says little about
    TensorRT.
    """
    test = load_test_sets(folder, backend.runner.input_names, backend.runner.output_names)[0]
    times = {}
    for count in sorted({1, len(next(iter(test.inputs.values())))}):
        inputs = {name: array[:count] for name, array in test.inputs.items()}
        if isinstance(backend.runner, TensorRTRunner):
            times[str(count)] = measure_engine(backend.runner.loaded, inputs, *TIMED_RUNS["tensorrt"]).to_dict()
        else:
            latency = measure_runner(backend.runner, inputs, *TIMED_RUNS["onnxruntime"])
            times[str(count)] = {"by_the_clock": latency.to_dict()}
    return times
