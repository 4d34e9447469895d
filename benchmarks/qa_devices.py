"""F1 of a finished question-answering run's fine-tuned models on the CPU and on the run's own device, in torch.

    python benchmarks/qa_devices.py --config configs/minilm_qa.yaml --data-dir /data/qa --output_dir runs/qa

The same weights on the same questions: what differs is rounding alone, so this is how far two right answers may be
apart. Training is not repeated: the run resumes at its end. Writes results/minilm_qa_devices.json.
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
from recipes.qa_config import build_parser, parse
from recipes.question_answering import QuestionAnswering

RESULTS = Path(__file__).resolve().parents[1] / "results" / "minilm_qa_devices.json"


def main(args: list[str]) -> int:
    """Evaluate each seed of the last variant twice."""
    config, _ = parse(build_parser(__doc__ or ""), args)
    run = QuestionAnswering(config)
    model = run.float_model()
    run.quantize(model)
    run.calibrate(model)
    variant, device = list(run.variants())[-1], run.device
    rows = []
    for seed in config.qat.seeds:
        tuned, _, metrics = run.fine_tune_variant(model, variant, seed)
        run.data.device = torch.device("cpu")
        rows.append({"seed": seed, "device": metrics, "cpu": run.evaluate(tuned.cpu())})
        run.data.device = device
        print(f"seed {seed}: F1 {metrics['f1']:.2f} on {device}, {rows[-1]['cpu']['f1']:.2f} on the CPU")
    write_json(RESULTS, {"environment": environment(), "device": str(device), "variant": variant, "rows": rows})
    return 0


if __name__ == "__main__":
    run_main(main)
