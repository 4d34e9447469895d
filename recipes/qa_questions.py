"""The questions of a run: their windows of tokens, and what a model makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from qat.distributed import rank, world_size
from qat.errors import ConfigError
from qat.runtime import TorchRunner
from qat.runtime.runner import Runner
from qat.training import make_loader
from qat.training.loader import SeededLoader
from recipes.qa_config import QaConfig
from recipes.qa_data import Example, has_impossible, read_squad
from recipes.qa_features import TrainWindows, Window, make_windows, padded
from recipes.qa_metric import best_null_threshold, evaluate_answers
from recipes.qa_predict import Prediction, predict, span_logits, texts
from recipes.run import Metrics
from recipes.transformers_models import Positional

OUTPUT_NAMES = ("start_logits", "end_logits")


class Questions:
    """Training and evaluation questions as the encoder sees them.

    Args:
        config: of the run.
        tokenizer: fast, of the encoder.
        names: inputs of the encoder.
        device: where torch models are evaluated.
    """

    def __init__(self, config: QaConfig, tokenizer: Any, names: Sequence[str], device: torch.device) -> None:
        self.config, self.tokenizer, self.names, self.device = config, tokenizer, tuple(names), device

    def _examples(self, name: str, need_answers: bool) -> list[Example]:
        data = self.config.data
        if data.dir is None:
            raise ConfigError(f"data.dir is not set. Give the folder that holds {name}: --data-dir FOLDER.")
        examples = read_squad(data.dir / name, need_answers)[: data.limit]
        if has_impossible(examples) and not data.unanswerable:
            raise ConfigError(f"{data.dir / name} has questions without an answer. Set data.unanswerable=true.")
        return examples

    @cached_property
    def train_windows(self) -> list[Window]:
        """Windows of the training file."""
        return make_windows(self._examples(self.config.data.train, True), self.tokenizer, self.config.data)

    @cached_property
    def dev(self) -> list[Example]:
        """Questions of the evaluation file."""
        return self._examples(self.config.data.dev, True)

    @cached_property
    def dev_windows(self) -> list[Window]:
        """Their windows."""
        return make_windows(self.dev, self.tokenizer, self.config.data)

    def runner(self, model: nn.Module) -> TorchRunner:
        """A torch model behind the runners' interface."""
        return TorchRunner(Positional(model, self.names), self.names, OUTPUT_NAMES, self.device)

    def answers(self, runner: Runner, limit: int | None = None, progress: bool = False) -> dict[str, Prediction]:
        """Predictions for the first `limit` questions of the evaluation file, or all."""
        data = self.config.data
        windows = self.dev_windows
        if limit is not None:
            windows = [window for window in windows if window.example < limit]
        pad = self.tokenizer.pad_token_id
        logits = span_logits(runner, windows, pad, data.eval_batch_size, progress=progress)
        return predict(self.dev[:limit], windows, logits, data)

    def metrics(self, predictions: dict[str, Prediction]) -> Metrics:
        """Exact match and F1 in percent; where questions may be unanswerable also with the best null threshold."""
        examples = [example for example in self.dev if example.id in predictions]
        found = evaluate_answers(examples, texts(predictions))
        if self.config.data.unanswerable:
            spans = {identity: p.best_span for identity, p in predictions.items()}
            scores = {identity: p.null_score for identity, p in predictions.items()}
            found["best_threshold"], found["best_f1"] = best_null_threshold(examples, spans, scores)
        return found

    def evaluate(self, model: nn.Module) -> Metrics:
        """`metrics` of a torch model, in the precision of the surroundings; the training flag is restored."""
        was_training = model.training
        found = self.metrics(self.answers(self.runner(model)))
        model.train(was_training)
        return found

    def batch(self, windows: Sequence[Window], length: int | None = None) -> dict[str, Tensor]:
        """The inputs (N, length) of some windows, on the CPU."""
        arrays = padded(windows, self.names, self.tokenizer.pad_token_id, length)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def example_inputs(self) -> dict[str, Tensor]:
        """Two windows of the evaluation file at full length, on the CPU."""
        return self.batch((self.dev_windows * 2)[:2], self.config.data.max_length)

    @property
    def calibration(self) -> Iterator[dict[str, Tensor]]:
        """Training windows in random order; with several processes each has its own."""
        data = self.config.data
        generator = torch.Generator().manual_seed(self.config.seed)
        order = torch.randperm(len(self.train_windows), generator=generator).tolist()[rank() :: world_size()]
        for first in range(0, len(order), data.eval_batch_size):
            yield self.batch([self.train_windows[n] for n in order[first : first + data.eval_batch_size]])

    def train(self, seed: int) -> SeededLoader:
        """Training batches (inputs, start, end) in the order of `seed`."""
        data = self.config.data
        windows = TrainWindows(self.train_windows, self.names, self.tokenizer.pad_token_id)
        return make_loader(windows, data.batch_size, seed=seed, num_workers=data.workers, collate_fn=windows.collate)
