"""Segmentation from training to deployment: train, calibrate, QAT, export, build, run, compare, draw.

    python scripts/segmentation.py --config configs/digits_unet.yaml
    python scripts/segmentation.py --config configs/membrane_unet.yaml --data_dir membrane

For each seed a float model is trained, calibrated by every method and fine-tuned. The first seed's model goes on: it is
written as a Q/DQ file for images of any size, with reference data (test_data_set_0) beside it; TensorRT builds an
engine with two profiles, or reuses it; the validation images are run in tiles on TensorRT, or on ONNX Runtime where no
GPU can run the engine. Ends with one table, results.json, results.png, comparison.png and masks/ in <output_dir>. Exit
code 1 if the file is not what torch computes, or worse than torch by more than export.threshold points of Dice. Run
again after an interruption, it resumes.
"""

from __future__ import annotations

from _common import run_main
from recipes import segmentation_results as res
from recipes.config import build_parser
from recipes.engines import tensorrt_line
from recipes.segmentation import Segmentation
from recipes.segmentation_config import SEGMENTATION_SHORT_NAMES, SegmentationConfig, parse_segmentation
from recipes.segmentation_deployment import concatenations_line
from recipes.segmentation_walk import deploy, draw, train_seed


def main(args: list[str]) -> int:
    """Run it; 1 where the file is not what torch computes."""
    config, _ = parse_segmentation(build_parser(__doc__, SegmentationConfig, SEGMENTATION_SHORT_NAMES), args)
    results, run, model = res.start(config), None, None
    for seed in config.seeds:
        current = Segmentation(config.for_seed(seed))
        entry, tuned = train_seed(current)
        results["seeds"].append(entry)
        if run is None:
            run, model = current, tuned
        if run.main:
            res.save(results, config.folder)  # what follows must not cost what was measured
    if not run.main:
        return 0
    failures = deploy(run, model, results)
    pictures = draw(run, model, results)
    saved = res.save(results, config.folder)
    print(res.table(results))
    print(*filter(None, (line(results["tensorrt"]) for line in (tensorrt_line, concatenations_line))))
    print(f"results: {saved}\npictures: {pictures}\nONNX file: {config.folder / 'qat.onnx'}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    run_main(main)
