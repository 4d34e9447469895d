"""The full run: float evaluation, calibration, PTQ evaluation by every method, fine-tuning, export, ONNX evaluation.

    python scripts/qat_finetune.py --config configs/digits.yaml
    torchrun --nproc_per_node=2 scripts/qat_finetune.py --config configs/efficientnet.yaml --data-dir /data/imagenet

Where a TensorRT library is installed it then builds the engine and counts the layers that run in INT8.
Ends with one table, results.json and results.png in <output_dir>. Exit code 1 if the ONNX file is worse than the torch
model by more than --threshold points. Run again after an interruption, it resumes.
"""

from __future__ import annotations

from torch import nn

from _common import run_main
from recipes import results as res
from recipes.classification import Classification
from recipes.config import build_parser, parse
from recipes.engines import tensorrt_entry, tensorrt_line


def main(args: list[str]) -> int:
    """Run it; 1 where the ONNX model misses the threshold."""
    config, _ = parse(build_parser(__doc__), args)
    run = Classification(config)
    tuned, results = measure(run)
    return export_and_report(run, tuned, results) if run.main else 0


def measure(run: Classification) -> tuple[nn.Module, res.Results]:
    """Float, PTQ by every method and QAT with every seed: the first seed's model, and the results so far."""
    config = run.config
    model = run.float_model()
    results = {**res.start(config, str(run.device)), "skipped_images": list(run.data.skipped)}
    results["float"] = run.evaluate(model)
    results["left_float"] = run.quantize(model)
    results["ptq"] = res.ptq_entries(run.calibrate(model))
    results["qat"] = []
    tuned = model
    for number, seed in enumerate(config.qat.seeds):
        trained, result = run.fine_tune(model, seed)
        results["qat"].append(res.qat_entry(seed, result))
        if number == 0:
            tuned = trained
    return tuned, results


def export_and_report(run: Classification, model: nn.Module, results: res.Results) -> int:
    """Export, ONNX evaluation, engine, table and files; 1 where the ONNX model misses the threshold."""
    config = run.config
    path = config.folder / "qat.onnx"
    exported = run.export(model, path)
    metrics = run.evaluate_onnx(path, config.export.eval_images)
    results["onnx"] = {"seed": config.qat.seeds[0], "file": path.name, "metrics": metrics, "export": exported}
    res.save(results, config.folder)  # a failing build must not cost what was measured
    results["tensorrt"] = tensorrt_entry(config, path)
    saved = res.save(results, config.folder)
    print(res.table(results))
    print(tensorrt_line(results["tensorrt"]))
    print(f"results: {saved}\nONNX file: {path}")
    loss = results["qat"][0]["metrics"]["top1"] - metrics["top1"]
    if config.export.eval_images is None and loss > config.export.threshold:
        print(f"FAILED: the ONNX file is {loss:.2f} points worse than torch; {config.export.threshold} are allowed")
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
