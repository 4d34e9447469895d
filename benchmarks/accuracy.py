"""What each way to INT8 keeps of one float model's accuracy: PTQ, PTQ with each improvement, and every kind of QAT.

    python benchmarks/accuracy.py --config configs/cifar10_mobilenet_v2.yaml --data-dir /data/cifar10
    python benchmarks/accuracy.py --config configs/digits.yaml --qat.epochs 1 --parts improved hard

All rows start from the float model that the run trains first. "hard" rows have one scale for a whole weight and the
maximum as amax, with which PTQ loses more. QAT is done with every seed of `qat.seeds`; its metrics are those of the
last epoch, so that nothing is chosen by them, in the precision it was trained in. Distillation has `qat.distill`, or
weight 1 and temperature 2 without one. An improvement that refuses the network has a row that says why, as has a QAT
that diverges. Each row is kept as it is made, and a run started again goes on. Writes
results/accuracy_<data>_<network>.json, with the names of the parts where not all are made, and prints a table.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from _common import run_main
from qat.calibration import MethodResult
from qat.errors import QatError, TrainingError
from qat.files import write_json
from qat.ptq import STEPS
from qat.report import format_table
from qat.training import DistillConfig
from recipes.classification import Classification
from recipes.config import QatConfig, QuantConfig, RunConfig, build_parser, parse
from recipes.data import ImageData
from recipes.results import label, name_of, spread, start, title

RESULTS = Path(__file__).resolve().parents[1] / "results"
PARTS = ("plain", "improved", "hard")
HARD = {"per_channel": False, "calibrator": "max"}
Row = dict[str, Any]


class SameData(Classification):
    """A run on data that another one has loaded."""

    def __init__(self, config: RunConfig, data: ImageData) -> None:
        self._loaded = data
        super().__init__(config)

    def load_data(self) -> ImageData:
        """The other run's."""
        return self._loaded


def main(args: list[str]) -> int:
    """Make every row, write them, print the table."""
    parser = build_parser(__doc__ or "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="rows to make")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    config, options = parse(parser, args)
    base = Classification(config)
    float_model = base.float_model()
    found = {**start(config, str(base.device)), "float": base.evaluate(float_model), "rows": []}
    parts = "" if set(options.parts) == set(PARTS) else "_" + "_".join(options.parts)
    path = options.results / f"accuracy_{name_of(config)}{parts}.json"
    for row in every_row(base, options.parts):
        found["rows"].append(row)
        write_json(path, found)
        print(f"{row['name']}: {row.get('refused') or spread([run['top1'] for run in row['metrics']])}", flush=True)
    print(table(found))
    print(f"results: {path}")
    return 0


def every_row(base: Classification, parts: Collection[str] = PARTS) -> Iterator[Row]:
    """Rows in the order of the table; the float model is there."""
    if "plain" in parts:
        yield from ptq_and_qat(base, "", tuple(kinds_of_qat(base.config.qat)))
    if "improved" in parts:
        yield from improved_rows(base)
    if "hard" in parts:
        hard = variant(base, "hard", replace(base.config.quant, **HARD))
        yield from ptq_and_qat(hard, "hard: ", ("QAT", "QAT, learned"))


def improved_rows(base: Classification) -> Iterator[Row]:
    """PTQ with each improvement, the best method of calibration; a row with the reason where it refuses the network."""
    quant = base.config.quant
    for step in STEPS:
        run = variant(base, step, replace(quant, improve=(step,), replace_relu6=True))
        try:
            results = calibrated(run)[1]
        except QatError as error:
            yield {"name": f"PTQ + {step}", "refused": str(error)}
            continue
        improved = [result for result in results if step == "equalize" or result.method.endswith(step)]
        if improved:  # a network without BatchNorm has none to re-estimate
            best = max(improved, key=lambda result: result.metrics[run.metric])
            yield {"name": f"PTQ + {step} ({best.method})", "metrics": [best.metrics]}


def variant(base: Classification, name: str, quant: QuantConfig) -> Classification:
    """A run in a folder of its own, from the float model of `base`."""
    folder = base.config.folder
    weights = base.config.model
    if not weights.is_trained:
        weights = replace(weights, checkpoint=str(folder / "float" / "best.pt"))
    return SameData(replace(base.config, model=weights, quant=quant, output_dir=folder / name), base.data)


def kinds_of_qat(plain: QatConfig) -> dict[str, QatConfig]:
    """The kinds of fine-tuning by name."""
    alone = replace(plain, distill=DistillConfig())
    teacher = plain.distill if plain.distill.active else DistillConfig(weight=1.0, temperature=2.0)

    def with_mode(mode: str) -> QatConfig:
        return replace(alone, train=replace(alone.train, amax_mode=mode))

    return {
        "QAT": with_mode("frozen"),
        "QAT, re-estimated": with_mode("reestimated"),
        "QAT, learned": with_mode("learned"),
        "QAT + distillation": replace(plain, distill=teacher),
    }


def calibrated(run: Classification) -> tuple[nn.Module, list[MethodResult]]:
    """The PTQ model, and what each step on the way to it gave."""
    model = run.float_model()
    run.quantize(model)
    return model, run.calibrate(model)


def ptq_and_qat(run: Classification, prefix: str, names: Collection[str]) -> Iterator[Row]:
    """Every method of calibration, then these kinds of QAT from the best; their metrics are the last epoch's."""
    model, results = calibrated(run)
    for result in results:
        yield {"name": f"{prefix}PTQ {result.method}", "metrics": [result.metrics]}
    for name, how in kinds_of_qat(run.config.qat).items():
        if name in names:
            folder = run.config.folder / name.replace(" ", "_").replace(",", "")
            try:
                tuned = [run.tune(model, seed, how, folder / f"seed{seed}")[1] for seed in how.seeds]
            except TrainingError as error:  # the loss is no number
                yield {"name": f"{prefix}{name}", "refused": str(error)}
                continue
            metrics = [result.history[-1]["metrics"] for result in tuned]
            yield {"name": f"{prefix}{name}", "epochs": len(tuned[0].history), "metrics": metrics}


def table(found: Row) -> str:
    """Top-1 of every row and its distance to float; several seeds as mean and standard deviation."""
    base = found["float"]["top1"]
    lines = [["float", f"{base:.2f}", ""]]
    for row in found["rows"]:
        if "refused" in row:
            lines.append([row["name"], "refused", ""])
            continue
        top1 = [run["top1"] for run in row["metrics"]]
        lines.append([label(row["name"], top1), spread(top1), f"{mean(top1) - base:+.2f}"])
    return format_table(title(found), ["model", "top-1 %", "vs float"], lines)


if __name__ == "__main__":
    run_main(main)
