"""Evaluate one file on the validation images: a float checkpoint, a quantized checkpoint or an ONNX file.

python scripts/evaluate.py --config configs/digits.yaml --file runs/digits_efficientnet_b0/qat.onnx
python scripts/evaluate.py --config configs/digits.yaml --file runs/digits_efficientnet_b0/ptq/model.pt
"""

from __future__ import annotations

from pathlib import Path

from _common import run_main
from qat.report import format_table
from recipes.classification import Classification
from recipes.config import build_parser, parse
from recipes.models import build_model, load_weights, read_checkpoint


def main(args: list[str]) -> None:
    """Run it."""
    parser = build_parser(__doc__)
    parser.add_argument("--file", type=str, required=True, help=".onnx file or checkpoint")
    config, options = parse(parser, args)
    path = Path(options.file)
    run = Classification(config)
    if path.suffix == ".onnx":
        metrics, kind = run.evaluate_onnx(path, config.export.eval_images), "ONNX Runtime"
    elif any(key.endswith("_quantizer._amax") for key in read_checkpoint(path)):
        metrics, kind = run.evaluate(run.load_quantized(path)), "quantized torch"
    else:
        model = build_model(config.model, len(run.data.classes))
        load_weights(model, read_checkpoint(path), path)
        metrics, kind = run.evaluate(model.to(run.device)), "float torch"
    if run.main:
        print(format_table(str(path), ("runs in", *metrics), [[kind, *(f"{v:.4f}" for v in metrics.values())]]))


if __name__ == "__main__":
    run_main(main)
