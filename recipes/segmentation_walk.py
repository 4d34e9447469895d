"""The walk of scripts/segmentation.py, step by step: train, deploy, draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from recipes import segmentation_deployment as deployment
from recipes.results import Results, ptq_entries, qat_entry
from recipes.segmentation import Segmentation, runner_predict
from recipes.segmentation_deployment import Backend
from recipes.segmentation_metrics import SegmentationMetrics, to_classes
from recipes.segmentation_pictures import overlay, save_comparison, save_image, save_masks
from recipes.tiling import fill_up, padded_size, predict_tiled


def train_seed(run: Segmentation) -> tuple[dict[str, Any], nn.Module]:
    """Float model, PTQ by every method, QAT: the seed's entry of the results, and the QAT model."""
    seed = run.config.seed
    model = run.float_model()
    entry: dict[str, Any] = {"seed": seed, "device": str(run.device), "float": run.evaluate(model)}
    entry["left_float"] = run.quantize(model)
    entry["ptq"] = ptq_entries(run.calibrate(model))
    tuned, result = run.fine_tune(model, seed)
    # The best epoch was evaluated under the training's mixed precision; float and PTQ are not.
    entry["qat"] = {**qat_entry(seed, result), "metrics": run.evaluate(tuned)}
    return entry, tuned


def deploy(run: Segmentation, model: nn.Module, results: Results) -> list[str]:
    """Export, check, build, run and measure; fills "onnx", "tensorrt" and "deployment" of the results.

    Returns:
        What is wrong with the file, in sentences; empty if nothing is.
    """
    folder = results_folder(run)
    path = folder / "qat.onnx"
    exported = run.export(model, path)
    sizes = deployment.check_sizes(run, model, path, _images_of_other_sizes(run))
    reference = deployment.write_reference(run, model, folder)
    results["onnx"] = {"seed": run.config.seed, "file": path.name, "export": exported, "sizes": sizes}
    engine, results["tensorrt"] = deployment.build(run, path)
    backend = deployment.open_backend(engine, results["tensorrt"], path)
    print(f"running on {backend.name}" + (f": {backend.why}" if backend.why else ""))
    results["deployment"] = {
        "backend": backend.name,
        "why_not_tensorrt": backend.why,
        "metrics": run.evaluate_runner(backend.runner),
        "tiled": _run_tiled(run, backend, folder / "masks"),
        "reference": deployment.compare_with_reference(backend.runner, reference),
        "times": deployment.measure(backend, reference),
    }
    return _failures(run, results)


def results_folder(run: Segmentation) -> Path:
    """Where the results of all seeds go."""
    return run.config.folder.parent


def _images_of_other_sizes(run: Segmentation) -> dict[str, Tensor]:
    pair = run.data.val_pairs[0]
    height, width = (padded_size(side) for side in pair.image.shape[1:])
    whole = fill_up(pair.image[None].float(), height, width)[0].to(torch.uint8)
    return {f"validation image {pair.name}": whole, "photograph": deployment.photograph(run.config.data.channels)}


def _run_tiled(run: Segmentation, backend: Backend, folder: Path) -> dict[str, float]:
    """Metrics of the validation images run in overlapping tiles; the masks and overlays are written to `folder`."""
    config, predict = run.config, runner_predict(backend.runner)
    metrics = SegmentationMetrics(run.data.classes, shared=False)
    for pair in tqdm(run.data.val_pairs, "tiles", leave=False):
        image = run.data.normalize(pair.image[None].to(run.device))[0].cpu()
        classes = to_classes(predict_tiled(predict, image, config.inference)[None])
        metrics.update(classes, pair.mask[None].long())
        save_masks(classes[0], config.data.mask_values, folder / pair.name)
        save_image(overlay(pair.image, classes[0], len(run.data.classes)), folder / f"{pair.name}_overlay.png", "PNG")
    return metrics.compute()


def _failures(run: Segmentation, results: Results) -> list[str]:
    found = []
    for row in results["onnx"]["sizes"]:
        if not row["passed"]:
            found.append(f"the file differs from torch at {row['size']} by {row['largest_relative_difference']:.2g}")
    loss = results["seeds"][0]["qat"]["metrics"]["dice"] - results["deployment"]["metrics"]["dice"]
    if loss > run.config.export.threshold:
        allowed = run.config.export.threshold
        found.append(
            f"{results['deployment']['backend']} is {loss:.2f} points of Dice worse than torch, over {allowed}"
        )
    return found


def draw(run: Segmentation, model: nn.Module, results: Results, index: int = 0) -> Path:
    """One validation image as float, the best PTQ model and QAT see it: comparison.png."""
    best = max(results["seeds"][0]["ptq"], key=lambda entry: entry["metrics"]["dice"])["method"]
    calibrated = run.load_quantized(run.config.folder / "ptq" / "model.pt")
    models = {"float": run.load_float(), f"PTQ {best}": calibrated, "QAT": model}
    pair = run.data.val_pairs[index]
    seen = {name: run.image_of(each, index) for name, each in models.items()}
    path = results_folder(run) / "comparison.png"
    save_comparison(path, pair.image, pair.mask, seen, len(run.data.classes))
    return path
