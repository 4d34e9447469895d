"""Find the layers that lose the accuracy, and the fewest to leave float for a target.

    python scripts/sensitivity.py --config configs/digits.yaml --drop 0.5
    python scripts/sensitivity.py --config configs/efficientnet.yaml --data-dir /data/imagenet --metric sqnr_db

Layers are ranked by one evaluation each, then left float one more at a time, each step evaluated, until top-1 is within
--drop points of float; those that turn out not to be needed are quantized again. Layers that share a quantizer go
together. Writes sensitivity.json, sensitivity.png, pareto.png and proposed.yaml, which qat_finetune.py takes, into
<output_dir>/sensitivity. Run again after an interruption, it goes on. Exit code 1 if the target is not reached.
"""

from __future__ import annotations

from pathlib import Path

from _common import run_main
from recipes.classification import Classification
from recipes.config import build_parser, parse
from recipes.sensitivity import Analysis, Level, Metric, Mode, Options, conclusion, table


def main(args: list[str]) -> int:
    """Run it; 1 where the proposal misses the target."""
    parser = build_parser(__doc__)
    parser.add_argument("--file", type=Path | None, help="calibrated or fine-tuned checkpoint; default: calibrate now")
    parser.add_argument("--metric", type=Metric, default="top1", help="rank by this; sqnr_db and kl need no labels")
    parser.add_argument("--mode", type=Mode, default="leave_one_out")
    parser.add_argument("--level", type=Level, default="layer")
    parser.add_argument("--drop", type=float, default=0.5, help="points of top-1 below float that may be lost")
    parser.add_argument("--whole", type=bool, default=False, help="go on to the last layer, for the whole curve")
    parser.add_argument("--score-batches", type=int, default=4, help="batches for sqnr_db and kl")
    parser.add_argument("--engines", type=int, default=0, help="choices to build TensorRT engines of, and to time")
    config, given = parse(parser, args)
    names = ("file", "metric", "mode", "level", "drop", "whole", "score_batches", "engines")
    run = Classification(config)
    analysis = Analysis(run, Options(**{name: given[name] for name in names}))
    ranking = analysis.rank()
    proposal = analysis.propose(ranking)
    checked = analysis.check(proposal)
    if not run.main:
        return 0
    results = analysis.save(ranking, proposal, checked)
    print(table(results))
    print(conclusion(results))
    print(f"results: {analysis.folder / 'sensitivity.json'}")
    if analysis.all_float(proposal):
        return 1
    print(f"configuration: {analysis.config_file}")
    return 1 if checked is not None and checked["top1"] < proposal.target else 0


if __name__ == "__main__":
    run_main(main)
