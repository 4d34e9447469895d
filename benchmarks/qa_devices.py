"""F1 of a finished question-answering run's fine-tuned models on the CPU and on the run's own device, in torch.

    python benchmarks/qa_devices.py --config configs/minilm_qa.yaml --data-dir /data/qa --output_dir runs/qa

The same weights on the same questions: what differs is rounding alone, so this is how far two right answers may be
apart. Writes results/minilm_qa_devices.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from _common import run_main
from qat.files import write_json
from qat.report import environment
from qat.runtime import TorchRunner
from recipes.qa_config import build_parser, parse
from recipes.qa_questions import OUTPUT_NAMES
from recipes.question_answering import QuestionAnswering
from recipes.transformers_models import Positional

RESULTS = Path(__file__).resolve().parents[1] / "results" / "minilm_qa_devices.json"


def main(args: list[str]) -> int:
    """Evaluate each seed of the last variant twice."""
    config, _ = parse(build_parser(__doc__ or ""), args)
    run = QuestionAnswering(config)
    variant = list(run.variants())[-1]
    rows = []
    for seed in config.qat.seeds:
        model = run.load_quantized(run.tuned_folder(variant, seed) / "model.pt")
        on_device = run.evaluate(model)
        names = run.data.names
        runner = TorchRunner(Positional(model.cpu(), names), names, OUTPUT_NAMES, torch.device("cpu"))
        rows.append({"seed": seed, "device": on_device, "cpu": run.evaluate_runner(runner)})
        print(f"seed {seed}: F1 {on_device['f1']:.2f} on {run.device}, {rows[-1]['cpu']['f1']:.2f} on the CPU")
    write_json(RESULTS, {"environment": environment(), "device": str(run.device), "variant": variant, "rows": rows})
    return 0


if __name__ == "__main__":
    run_main(main)
