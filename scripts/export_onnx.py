"""Export a calibrated or fine-tuned checkpoint as a Q/DQ ONNX file, checked against torch on real images.

    python scripts/export_onnx.py --config configs/digits.yaml
    python scripts/export_onnx.py --config configs/digits.yaml --checkpoint runs/x/ptq/model.pt --output ptq.onnx
    python scripts/export_onnx.py --config configs/digits.yaml --precision fp16 --output model.fp16.onnx

Without --checkpoint the first seed's fine-tuned model is taken, or the calibrated one where there is none. TensorRT
runs what is not INT8 in the type that the file gives it: --precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from _common import run_main
from qat.errors import ConfigError
from recipes.classification import Classification
from recipes.config import RunConfig, build_parser, parse


def main(args: list[str]) -> None:
    """Run it."""
    parser = build_parser(__doc__)
    parser.add_argument("--checkpoint", type=str | None, help="quantized checkpoint")
    parser.add_argument("--output", type=str | None, help="file to write; default <output_dir>/model.onnx")
    parser.add_argument(
        "--precision",
        type=Literal["fp32", "fp16", "bf16"],
        default="fp32",
        help="type of all that is not INT8; ONNX Runtime's CPU provider does not run bf16",
    )
    config, options = parse(parser, args)
    checkpoint = Path(options.checkpoint) if options.checkpoint else default_checkpoint(config)
    run = Classification(config)
    path = Path(options.output) if options.output else config.folder / "model.onnx"
    report = run.export(run.load_quantized(checkpoint), path, options.precision)
    print(f"{checkpoint} -> {path}")
    for key, value in report.items():
        print(f"  {key}: {value}")


def default_checkpoint(config: RunConfig) -> Path:
    """The first checkpoint there is of those the run makes; ConfigError that says what to run."""
    folder = config.folder
    candidates = [folder / "qat" / f"seed{config.qat.seeds[0]}" / "model.pt", folder / "ptq" / "model.pt"]
    for path in candidates:
        if path.exists():
            return path
    raise ConfigError(f"no quantized checkpoint in {folder}. Run scripts/calibrate.py or qat_finetune.py first.")


if __name__ == "__main__":
    run_main(main)
