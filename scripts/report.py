"""Write one HTML page about a finished run: accuracies, training curves, noise by layer, histograms, quantizers.

    python scripts/report.py runs/digits_efficientnet_b0
    python scripts/report.py runs/imagefolder_resnet50 --data-dir /data/imagenet --output report.html

The page needs no network. Layers and histograms are measured now, on calibration images; without the data they are
left out, and the page says so. The results of scripts/sensitivity.py are included. Options of the run override
RUN_FOLDER/config.yaml.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _common import run_main
from qat.errors import ConfigError
from qat.report.page import Section, write_page
from recipes import report
from recipes import results as res
from recipes.classification import Classification
from recipes.config import RunConfig, build_parser, parse


def main(args: list[str]) -> None:
    """Run it."""
    parser = build_parser(__doc__)
    parser.add_argument("folder", type=Path, help="RUN_FOLDER, with results.json")
    parser.add_argument("--output", type=Path | None, help="default: RUN_FOLDER/report.html")
    parser.add_argument("--file", type=Path | None, help="checkpoint to look into; default: QAT's first seed, or PTQ")
    parser.add_argument("--num-batches", type=int, default=4, help="calibration batches for the histograms")
    folder = next((Path(arg) for arg in args if (Path(arg) / "results.json").is_file()), None)
    if folder is None:
        raise ConfigError(
            "no RUN_FOLDER with a results.json was given. Run scripts/qat_finetune.py first, then "
            "scripts/report.py RUN_FOLDER."
        )
    own = ["--config", str(folder / "config.yaml"), f"--output_dir={folder}"]
    config, options = parse(parser, [*own, *args])
    results = report.read_json(folder / "results.json")
    sections = [
        report.accuracy_section(results),
        report.curves_section(results, folder),
        *_model_sections(config, options.file or report.pick_checkpoint(config, folder), options.num_batches),
        report.sensitivity_section(folder),
        report.settings_section(results),
    ]
    path = options.output or folder / "report.html"
    environment = results["environment"]
    gpus = ", ".join(environment["gpu"]) or "no GPU"
    subtitle = f"{environment['date']}, commit {environment['commit']}, {environment['cpu']}, {gpus}"
    write_page(path, res.title(results), subtitle, sections)
    print(f"report: {path}")


def _model_sections(config: RunConfig, file: Path | None, batches: int) -> list[Section]:
    if file is None:
        return [Section("Quantizers", ["There is no calibrated or fine-tuned checkpoint in this folder."])]
    try:
        run = Classification(config)
        return report.model_sections(run, run.load_quantized(file), batches)
    except ConfigError as error:
        print(f"left out: layers, histograms and quantizers: {error}", file=sys.stderr)
        return [Section("Quantizers", [f"Layers, histograms and quantizers are left out: {error}"])]


if __name__ == "__main__":
    run_main(main)
