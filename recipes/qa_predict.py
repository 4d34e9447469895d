"""From logits to answers: the best spans of a question over all its windows (Devlin et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from qat.files import write_json
from qat.runtime.runner import Runner, run_padded
from recipes.qa_config import QaDataConfig
from recipes.qa_data import Example
from recipes.qa_features import Window, padded

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Candidate:
    """One of a question's answers; `text` is empty for "no answer". Probabilities are over the n best."""

    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float
    probability: float = 0.0

    @property
    def score(self) -> float:
        """Sum of both logits."""
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Prediction:
    """What is answered.

    Attributes:
        text: the answer; empty for none.
        probability: of that answer among the n best.
        null_score: score of "no answer" less that of the best span; -inf unless questions may be unanswerable.
        best: best candidates first, "no answer" among them where it is allowed.
    """

    text: str
    probability: float
    null_score: float
    best: tuple[Candidate, ...]

    @property
    def best_span(self) -> str:
        """The best text that is not empty; empty where there is none."""
        return next((candidate.text for candidate in self.best if candidate.text), "")


def span_logits(
    runner: Runner,
    windows: Sequence[Window],
    pad: int,
    batch_size: int,
    length: int | None = None,
    fixed_batch: bool = False,
    progress: bool = False,
) -> list[tuple[Logits, Logits]]:
    """Start and end logits (L,) of every window, in the order given; windows of like length share a batch.

    Args:
        runner: takes input_ids and alike (N, L) as int64, gives start_logits and end_logits.
        windows: what to run.
        pad: token of padding.
        batch_size: windows a batch.
        length: tokens of every sequence, for a model of fixed length; else the longest window of the batch.
        fixed_batch: fill up the last batch, for a model of fixed batch.
        progress: show a bar.
    """
    order = sorted(range(len(windows)), key=lambda number: -len(windows[number].input_ids))
    results: list[tuple[Logits, Logits]] = [(np.empty(0, np.float32),) * 2] * len(windows)
    for first in tqdm(range(0, len(order), batch_size), "answer", disable=not progress, leave=False):
        chosen = order[first : first + batch_size]
        batch = padded([windows[number] for number in chosen], runner.input_names, pad, length)
        outputs = run_padded(runner, batch, batch_size) if fixed_batch else runner.run(batch)
        for row, number in enumerate(chosen):
            size = len(windows[number].input_ids)
            start, end = (np.asarray(outputs[n][row, :size], np.float32) for n in ("start_logits", "end_logits"))
            results[number] = (start, end)
    return results


def predict(
    examples: Sequence[Example],
    windows: Sequence[Window],
    logits: Sequence[tuple[Logits, Logits]],
    data: QaDataConfig,
) -> dict[str, Prediction]:
    """The prediction of every question, by id."""
    spans: list[list[Candidate]] = [[] for _ in examples]
    nulls = [Candidate("", 0, 0, 0.0, 0.0)] * len(examples)
    lowest = np.full(len(examples), np.inf)
    for window, (start, end) in zip(windows, logits, strict=True):
        number = window.example
        spans[number] += _spans(examples[number].context, window, start, end, data)
        if start[0] + end[0] < lowest[number]:
            # "No answer" must hold in every window, so the least sure one counts.
            lowest[number] = start[0] + end[0]
            nulls[number] = Candidate("", 0, 0, float(start[0]), float(end[0]))
    return {example.id: _decide(spans[number], nulls[number], data) for number, example in enumerate(examples)}


def _spans(context: str, window: Window, start: Logits, end: Logits, data: QaDataConfig) -> list[Candidate]:
    """The best spans of one window: inside the passage, not too long, begun where the token has its best context."""
    of_passage = window.offsets[:, 0] >= 0
    firsts = _largest(start, of_passage & window.readable, data.n_best)
    lasts = _largest(end, of_passage, data.n_best)
    scores = start[firsts][:, None] + end[lasts][None, :]
    lengths = lasts[None, :] - firsts[:, None] + 1
    scores = np.where((lengths > 0) & (lengths <= data.max_answer_length), scores, -np.inf)
    found = []
    for flat in np.argsort(-scores, axis=None, kind="stable")[: data.n_best]:
        row, column = np.unravel_index(flat, scores.shape)
        if np.isfinite(scores[row, column]):
            first, last = firsts[row], lasts[column]
            begin, behind = int(window.offsets[first, 0]), int(window.offsets[last, 1])
            found.append(Candidate(context[begin:behind], begin, behind, float(start[first]), float(end[last])))
    return found


def _largest(values: Logits, allowed: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """Positions of the largest allowed values, largest first."""
    positions = np.flatnonzero(allowed)
    order = np.argsort(-values[positions], kind="stable")
    chosen: NDArray[np.int64] = positions[order[:count]]
    return chosen


def _decide(spans: Sequence[Candidate], null: Candidate, data: QaDataConfig) -> Prediction:
    unique: dict[tuple[int, int], Candidate] = {}
    for candidate in sorted(spans, key=lambda c: -c.score):
        unique.setdefault((candidate.start, candidate.end), candidate)
    best = list(unique.values())[: data.n_best]
    null_score = -float("inf")
    if data.unanswerable:
        null_score = null.score - best[0].score if best else float("inf")
        best = sorted([*best[: data.n_best - 1], null], key=lambda c: -c.score)
    if not best:
        best = [null]
    weights = np.exp(np.array([c.score for c in best]) - best[0].score)
    shares = (weights / weights.sum()).tolist()
    best = [Candidate(**{**vars(c), "probability": p}) for c, p in zip(best, shares, strict=True)]
    refuse = null_score > data.null_threshold
    chosen = next((c for c in best if bool(c.text) != refuse), best[0])
    return Prediction(chosen.text, chosen.probability, null_score, tuple(best))


def texts(predictions: Mapping[str, Prediction]) -> dict[str, str]:
    """id -> answer: what the official evaluation reads."""
    return {identity: prediction.text for identity, prediction in predictions.items()}


def write_predictions(folder: Path, predictions: Mapping[str, Prediction]) -> tuple[Path, Path]:
    """Write predictions.json (id -> text) and nbest_predictions.json (id -> candidates) into a folder."""
    plain, n_best = folder / "predictions.json", folder / "nbest_predictions.json"
    write_json(plain, texts(predictions))
    write_json(n_best, {identity: _plain(prediction) for identity, prediction in predictions.items()})
    return plain, n_best


def _plain(prediction: Prediction) -> list[dict[str, Any]]:
    return [{key: value for key, value in vars(c).items() if key not in ("start", "end")} for c in prediction.best]
