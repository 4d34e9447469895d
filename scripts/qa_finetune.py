"""The full question-answering run: float, calibration, PTQ by every method, QAT and distillation, export, evaluation.

    python scripts/qa_finetune.py --config configs/minilm_qa.yaml --data-dir /data/qa
    torchrun --nproc_per_node=2 scripts/qa_finetune.py --config configs/bert_squad.yaml --data-dir /data/squad

Ends with one table, results.json, predictions.json and nbest_predictions.json in <output_dir>; results.json is written
after every stage. Exit code 1 if the F1 of the ONNX files, one for each seed, is off torch's by more than --threshold
points in the mean: one question that flips at a rounding boundary moves a single file's F1 by more than that. Run again
after an interruption, it resumes. Then ask the model: python scripts/answer.py --run <output_dir>.
"""

from __future__ import annotations

from typing import Any

from _common import run_main
from qat.runtime import OnnxRuntimeRunner
from recipes import qa_results, results
from recipes.engines import tensorrt_line
from recipes.qa_config import build_parser, parse
from recipes.qa_predict import write_predictions
from recipes.question_answering import QuestionAnswering

ONNX_NAME = "qat.onnx"


def main(args: list[str]) -> int:
    """Run it; 1 where the ONNX model misses the threshold."""
    config, _ = parse(build_parser(__doc__), args)
    run = QuestionAnswering(config)
    found = results.start(config, str(run.device))
    model = run.float_model()
    keep(run, found, float=run.evaluate(model))
    float_model = run.load_float()
    keep(run, found, left_float=run.quantize(model))
    keep(run, found, ptq=results.ptq_entries(run.calibrate(model)))
    tuned = _fine_tune(run, model, found)
    if not run.main:
        return 0
    _export_and_evaluate(run, tuned, found)
    return _finish(run, float_model, found)


def keep(run: QuestionAnswering, found: results.Results, **entries: Any) -> None:
    """Add entries and write what there is."""
    found |= entries
    if run.main:
        results.write(found, run.config.folder)


def _fine_tune(run: QuestionAnswering, model: Any, found: results.Results) -> dict[int, Any]:
    """Every variant with every seed; returns the models of the last variant by seed."""
    tuned: dict[int, Any] = {}
    entries: list[dict[str, Any]] = []
    for variant in run.variants():
        for seed in run.config.qat.seeds:
            tuned[seed], result, metrics = run.fine_tune_variant(model, variant, seed)
            entries.append({"variant": variant, **results.qat_entry(seed, result), "metrics": metrics})
            keep(run, found, qat=entries)
    return tuned


def _export_and_evaluate(run: QuestionAnswering, tuned: dict[int, Any], found: results.Results) -> None:
    """One file a seed, qat.onnx for the first, evaluated in ONNX Runtime; the first file's answers are written."""
    config, variant, entries = run.config, list(run.variants())[-1], []
    run.tokenizer.save_pretrained(str(config.folder / "tokenizer"))
    for number, (seed, model) in enumerate(tuned.items()):
        path = config.folder / (f"qat_seed{seed}.onnx" if number else ONNX_NAME)
        exported = run.export(model, path)
        answers = run.data.answers(OnnxRuntimeRunner(path), config.export.eval_images, progress=True)
        if not number:
            write_predictions(config.folder, answers)
        metrics = run.data.metrics(answers)
        entries.append({"variant": variant, "seed": seed, "file": path.name, "metrics": metrics, "export": exported})
        keep(run, found, onnx=entries)


def _finish(run: QuestionAnswering, float_model: Any, found: results.Results) -> int:
    config = run.config
    path, float_path = config.folder / ONNX_NAME, config.folder / "float.onnx"
    run.export(float_model, float_path)
    keep(run, found, cpu_speed=qa_results.cpu_speed(run, {"float": float_path, "INT8": path}))
    # A failing build must not cost what was measured, so it comes last.
    keep(run, found, tensorrt=qa_results.engine_entry(run, path))
    print(qa_results.table(found))
    print(qa_results.speed_table(found["cpu_speed"]))
    print(tensorrt_line(found["tensorrt"]))
    print(f"results: {config.folder / 'results.json'}\nONNX file: {path}")
    torch_f1, onnx_f1 = qa_results.exported_f1(found)
    if config.export.eval_images is None and abs(torch_f1 - onnx_f1) > config.export.threshold:
        print(f"FAILED: the ONNX files' mean F1 is {onnx_f1:.2f} and torch's {torch_f1:.2f}")
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
