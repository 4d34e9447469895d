"""The full question-answering run: float, calibration, PTQ by every method, QAT and distillation, export, evaluation.

    python scripts/qa_finetune.py --config configs/minilm_qa.yaml --data-dir /data/qa
    torchrun --nproc_per_node=2 scripts/qa_finetune.py --config configs/bert_squad.yaml --data-dir /data/squad

Ends with one table, results.json, predictions.json and nbest_predictions.json in <output_dir>; results.json is written
after every stage. Exit code 1 if the ONNX file's F1 is off torch's by more than --threshold points. Run again after
an interruption, it resumes. Then ask the model: python scripts/answer.py --run <output_dir>.
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
    return _export_and_report(run, tuned, float_model, found)


def keep(run: QuestionAnswering, found: results.Results, **entries: Any) -> None:
    """Add entries and write what there is."""
    found |= entries
    if run.main:
        results.write(found, run.config.folder)


def _fine_tune(run: QuestionAnswering, model: Any, found: results.Results) -> Any:
    """Every variant with every seed; returns the first seed of the last variant."""
    tuned = model
    entries: list[dict[str, Any]] = []
    for variant in run.variants():
        for number, seed in enumerate(run.config.qat.seeds):
            trained, result, metrics = run.fine_tune_variant(model, variant, seed)
            entries.append({"variant": variant, **results.qat_entry(seed, result), "metrics": metrics})
            keep(run, found, qat=entries)
            if number == 0:
                tuned = trained
    return tuned


def _export_and_report(run: QuestionAnswering, model: Any, float_model: Any, found: results.Results) -> int:
    config = run.config
    variant, seed = list(run.variants())[-1], config.qat.seeds[0]
    path, float_path = config.folder / "qat.onnx", config.folder / "float.onnx"
    exported = run.export(model, path)
    run.export(float_model, float_path)
    run.tokenizer.save_pretrained(str(config.folder / "tokenizer"))
    answers = run.data.answers(OnnxRuntimeRunner(path), config.export.eval_images, progress=True)
    write_predictions(config.folder, answers)
    metrics = run.data.metrics(answers)
    entry = {"variant": variant, "seed": seed, "file": path.name, "metrics": metrics, "export": exported}
    keep(run, found, onnx=entry)
    keep(run, found, cpu_speed=qa_results.cpu_speed(run, {"float": float_path, "INT8": path}))
    # A failing build must not cost what was measured, so it comes last.
    keep(run, found, tensorrt=qa_results.engine_entry(run, path))
    print(qa_results.table(found))
    print(qa_results.speed_table(found["cpu_speed"]))
    print(tensorrt_line(found["tensorrt"]))
    print(f"results: {config.folder / 'results.json'}\nONNX file: {path}")
    torch_f1 = next(e["metrics"]["f1"] for e in found["qat"] if (e["variant"], e["seed"]) == (variant, seed))
    if config.export.eval_images is None and abs(torch_f1 - metrics["f1"]) > config.export.threshold:
        print(f"FAILED: the ONNX file's F1 is {metrics['f1']:.2f} and torch's {torch_f1:.2f}")
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
