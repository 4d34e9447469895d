"""Calibrate a model (PTQ): float evaluation, statistics collected once, every method evaluated, the best one kept.

    python scripts/calibrate.py --calibrator histogram
    python scripts/calibrate.py --config configs/efficientnet.yaml --data-dir /data/imagenet --calibrator max

Without a checkpoint or pretrained weights a float model is trained first. The calibrated model is
<output_dir>/ptq/model.pt.
"""

from __future__ import annotations

import qat
from _common import run_main
from recipes import results as res
from recipes.classification import Classification
from recipes.config import build_parser, parse


def main(args: list[str]) -> None:
    """Run it."""
    config, _ = parse(build_parser(__doc__), args)
    run = Classification(config)
    model = run.float_model()
    results = res.start(config, str(run.device))
    results["float"] = run.evaluate(model)
    run.quantize(model)
    results["ptq"] = res.ptq_entries(run.calibrate(model))
    if run.main:
        print(qat.summary(model))
        print(res.table(results))
        print(f"calibrated model: {config.folder / 'ptq' / 'model.pt'}")
        res.save(results, config.folder / "ptq")


if __name__ == "__main__":
    run_main(main)
