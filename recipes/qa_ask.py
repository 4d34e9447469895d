"""Asking a finished run's model: any of its files behind one interface, passages of any length."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qat.errors import ConfigError
from qat.runtime import OnnxRuntimeRunner
from qat.runtime.runner import Runner
from qat.tensorrt import TensorRTRunner, load_engine, load_library
from recipes.models import load_weights, read_checkpoint
from recipes.qa_config import QaConfig, build_parser, parse
from recipes.qa_data import Example
from recipes.qa_features import make_windows, question_tokens
from recipes.qa_predict import Prediction, predict, span_logits
from recipes.qa_questions import OUTPUT_NAMES
from recipes.question_answering import QuestionAnswering
from recipes.transformers_models import load_tokenizer


@dataclass(frozen=True)
class Reader:
    """A model that answers questions.

    Attributes:
        runner: executes it.
        kind: what that is, in words.
        tokenizer: of the model.
        config: of the run that made it.
        length: tokens of every sequence, for an engine whose sequences are fixed; None for any.
        batch: windows a call.
    """

    runner: Runner
    kind: str
    tokenizer: Any
    config: QaConfig
    length: int | None = None
    batch: int = 1

    def ask(self, examples: Sequence[Example], progress: bool = False) -> tuple[dict[str, Prediction], float]:
        """Predictions by id, and the milliseconds it took from text to answers."""
        data = self.config.data
        if self.length is not None:
            data = replace(data, max_length=min(data.max_length, self.length))
        started = time.perf_counter()
        windows = make_windows(examples, self.tokenizer, data)
        pad = self.tokenizer.pad_token_id
        logits = span_logits(self.runner, windows, pad, self.batch, self.length, progress=progress)
        predictions = predict(examples, windows, logits, data)
        return predictions, 1000 * (time.perf_counter() - started)


def check_question(reader: Reader, question: str, passage: str) -> None:
    """Refuse what a person would not want answered.

    Raises:
        ConfigError: the passage or the question is empty, or the question is longer than the limit.
    """
    for name, text in (("passage", passage), ("question", question)):
        if not text.strip():
            raise ConfigError(f"the {name} is empty. Give some text.")
    count, most = len(question_tokens(reader.tokenizer, question)), reader.config.data.max_query_length
    if count > most:
        raise ConfigError(
            f"the question has {count} tokens and data.max_query_length is {most}. Ask a shorter one, or raise the "
            "limit (--data.max_query_length)."
        )


def open_reader(folder: Path, file: str | None, overrides: Sequence[str] = ()) -> Reader:
    """The model of a finished run.

    Args:
        folder: the run's output folder.
        file: .onnx for ONNX Runtime, .engine for TensorRT, .pt for torch; the folder's qat.onnx by default.
        overrides: options of the configuration, such as "--data.null_threshold=1".

    Raises:
        ConfigError: no run in the folder, or no such file.
        RunnerError, EngineError: the file cannot be executed.
    """
    described = folder / "config.yaml"
    if not described.is_file():
        raise ConfigError(f"{folder} holds no finished run: config.yaml is missing. Run scripts/qa_finetune.py first.")
    config, _ = parse(build_parser(""), ["--config", str(described), *overrides])
    path = folder / "qat.onnx" if file is None else Path(file)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}. Give one of the run's .onnx, .engine or .pt files.")
    saved = folder / "tokenizer"
    tokenizer = load_tokenizer(str(saved) if saved.is_dir() else config.model.name)
    if path.suffix == ".onnx":
        return Reader(OnnxRuntimeRunner(path), "ONNX Runtime on the CPU", tokenizer, config)
    if path.suffix in (".engine", ".plan"):
        return _engine_reader(path, tokenizer, config)
    run = QuestionAnswering(config)
    state = read_checkpoint(path)
    if any(key.endswith("_quantizer._amax") for key in state):
        model, kind = run.load_quantized(path), "quantized torch"
    else:
        model, kind = run.build(pretrained=False), "float torch"
        load_weights(model, state, path)
    return Reader(run.data.runner(model.to(run.device)), f"{kind} on {run.device}", tokenizer, config)


def _engine_reader(path: Path, tokenizer: Any, config: QaConfig) -> Reader:
    """An engine takes the sequence lengths of its profiles only: the longest serves every question."""
    library = load_library(config.tensorrt.library)
    runner = TensorRTRunner(load_engine(path, library))
    if list(runner.output_names) != list(OUTPUT_NAMES):
        raise ConfigError(f"{path} has the outputs {runner.output_names}: it does not answer questions.")
    length = config.engine_lengths[-1]
    return Reader(runner, f"{library.name} {library.version}", tokenizer, config, length)
