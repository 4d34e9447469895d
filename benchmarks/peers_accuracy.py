"""INT8 accuracy of three toolkits side by side: ours, NVIDIA's Model Optimizer and its pytorch-quantization.

    python benchmarks/peers_accuracy.py --config configs/cifar10_mobilenet_v2.yaml --data-dir /data/cifar10 \
        --model.checkpoint runs/imagefolder_mobilenet_v2/float/best.pt --peers ours modelopt pytorch_quantization

All start from the same float weights, calibrate on the same batches, each as its own documentation recommends, and are
fine-tuned from their best PTQ model by the same loop: batches, seeds, optimizer, epochs, precision. Ours has the amax
mode of the configuration; the peers keep amax as it was calibrated. Top-1 after QAT is that of the last epoch, so that
nothing is chosen by it. benchmarks/peers.py says how each is used and where it comes from. One that is not installed,
or fails, has a row that says why; a seed whose training fails is counted. Each row is kept as it is made, and a run
started again goes on. Writes results/peers_accuracy_<data>_<network>.json and prints a table.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import traceback
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from _common import run_main
from peers import Calibrated, modelopt, pytorch_quantization
from qat import __version__, summary
from qat.errors import QatError, TrainingError
from qat.files import write_json
from qat.report import format_table
from qat.training import TrainResult
from recipes.classification import Classification
from recipes.config import build_parser, parse
from recipes.results import label, name_of, spread, start, title

RESULTS = Path(__file__).resolve().parents[1] / "results"
Row = dict[str, Any]


def main(args: list[str]) -> int:
    """Make a row for every toolkit, write them, print the table."""
    parser = build_parser(__doc__ or "")
    parser.add_argument("--peers", nargs="+", choices=tuple(TOOLKITS), default=list(TOOLKITS), help="toolkits to run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    config, options = parse(parser, args)
    base = Classification(config)
    float_model = base.float_model()
    layers = sum(isinstance(m, nn.Conv2d | nn.Linear) for m in float_model.modules())
    found: Row = {**start(config, str(base.device)), "float": base.evaluate(float_model), "layers": layers}
    path = options.results / f"peers_accuracy_{name_of(config)}.json"
    found["rows"] = rows_so_far(path, found)
    for name in options.peers:
        if name not in [row["name"] for row in found["rows"]]:
            found["rows"].append(row_or_reason(base, name, float_model))
            write_json(path, found)
    print(f"{table(found)}\nresults: {path}")
    return 0


def ours(base: Classification, float_model: nn.Module) -> Calibrated:
    """This project with the placement, the methods and the improvements of the configuration."""
    base.quantize(float_model)
    results = base.calibrate(float_model)
    rows = [row for row in summary(float_model).quantizers if row.state == "quantizing"]
    adds = {reader for row in rows for reader in row.readers if re.search(r"(^|\.)i?add(_\d+)?$", reader)}
    ptq = {result.method: result.metrics[base.metric] for result in results}
    return Calibrated(float_model, __version__, ptq, tuple(row.name for row in rows), len(adds), "qat")


TOOLKITS = {"ours": ours, "modelopt": modelopt, "pytorch_quantization": pytorch_quantization}


def rows_so_far(path: Path, found: Row) -> list[Row]:
    """The rows with numbers that an earlier run with the same configuration made."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    same = all(before[key] == found[key] for key in ("config", "device"))
    return [row for row in before["rows"] if "missing" not in row] if same else []


def row_or_reason(base: Classification, name: str, float_model: nn.Module) -> Row:
    """The toolkit's row; why there is none where the toolkit is missing or fails. Errors of ours are raised."""
    try:
        return make_row(base, name, float_model)
    except QatError:
        raise
    except Exception as error:
        if name == "ours":
            raise
        if not isinstance(error, ImportError):
            traceback.print_exc()
        return {"name": name, "missing": f"{type(error).__name__}: {error}"}


def make_row(base: Classification, name: str, float_model: nn.Module) -> Row:
    """PTQ, then QAT with every seed."""
    calibrated = TOOLKITS[name](base, copy.deepcopy(float_model))
    tuned, failed = tune_all(base, calibrated.model, base.config.folder / "peers" / name)
    row: Row = {
        "name": name,
        "version": calibrated.version,
        "kernels": calibrated.kernels,
        "quantizers": len(calibrated.quantizers),
        "weights": sum(quantizer.endswith("weight_quantizer") for quantizer in calibrated.quantizers),
        "residual_adds": calibrated.residual_adds,
        "ptq": calibrated.ptq,
        "epochs": len(tuned[0].history) if tuned else None,
        "seconds_per_epoch": [result.history[-1]["seconds"] for result in tuned],
        "metrics": [result.history[-1]["metrics"] for result in tuned],
        "failed": failed,
    }
    print(f"{name}: {after_qat(row)}", flush=True)
    return row


def tune_all(base: Classification, model: nn.Module, folder: Path) -> tuple[list[TrainResult], dict[str, str]]:
    """QAT with every seed: the results, and why the other seeds failed."""
    tuned, failed = [], {}
    for seed in base.config.qat.seeds:
        try:
            tuned.append(base.tune(model, seed, base.config.qat, folder / f"seed{seed}")[1])
        except TrainingError as error:
            failed[str(seed)] = str(error)
    return tuned, failed


def after_qat(row: Row) -> str:
    """Top-1 of the seeds that came to their end, and how many did not."""
    top1 = [metrics["top1"] for metrics in row["metrics"]]
    lost = f"{len(row['failed'])} of {len(row['failed']) + len(top1)} seeds failed" if row.get("failed") else ""
    return ", ".join(filter(None, [spread(top1) if top1 else "", lost]))


def table(found: Row) -> str:
    """Top-1 after PTQ and QAT, and what is quantized; several seeds as mean and standard deviation."""
    base, layers = found["float"]["top1"], found["layers"]
    lines = [["float", f"{base:.2f}", "", "", f"0 of {layers}", "", ""]]
    for row in found["rows"]:
        if "missing" in row:
            lines.append([row["name"], "missing", *[""] * 5])
            continue
        top1 = [metrics["top1"] for metrics in row["metrics"]]
        method = max(row["ptq"], key=row["ptq"].get)
        lines.append(
            [
                label(f"{row['name']} {row['version']}", top1),
                f"{row['ptq'][method]:.2f} ({method})",
                after_qat(row),
                f"{mean(top1) - base:+.2f}" if top1 else "",
                f"{row['weights']} of {layers}",
                str(row["quantizers"]),
                str(row["residual_adds"]),
            ]
        )
    columns = ["toolkit", "PTQ top-1 %", "QAT top-1 %", "vs float", "INT8 layers", "quantizers", "INT8 additions"]
    notes = [f"{row['name']}: {row['missing']}" for row in found["rows"] if "missing" in row]
    notes += [f"{row['name']}, seed {n}: {why}" for row in found["rows"] for n, why in row.get("failed", {}).items()]
    return "\n".join([format_table(title(found), columns, lines), *notes])


if __name__ == "__main__":
    run_main(main)
