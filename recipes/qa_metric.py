"""Exact match and F1 as SQuAD defines them (Rajpurkar et al. 2016; with unanswerable questions 2018).

Both compare texts after normalization: lower case, without punctuation, articles and superfluous spaces. F1 is between
the bags of words. Of several reference answers the best counts; a question without an answer is right where the
prediction is empty.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from qat.errors import ConfigError
from recipes.qa_data import Example, has_impossible

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation, the words a, an, the, and superfluous spaces; in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 where both are the same after normalization, else 0."""
    return float(normalized(prediction) == normalized(reference))


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words, 0 to 1; without words on one side, whether both have none."""
    ours, theirs = normalized(prediction).split(), normalized(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def scores(example: Example, prediction: str) -> tuple[float, float]:
    """Exact match and F1 against the best reference answer; references that normalize to nothing do not count."""
    references = [answer.text for answer in example.answers if normalized(answer.text)] or [""]
    pairs = [(exact_match(prediction, text), f1(prediction, text)) for text in references]
    return max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)


def evaluate_answers(examples: Sequence[Example], predictions: Mapping[str, str]) -> dict[str, float]:
    """Percentages over all questions; in a v2.0 file also over those with an answer and those without.

    Args:
        examples: questions with reference answers.
        predictions: id -> text, "" for no answer.

    Returns:
        "exact" and "f1"; with unanswerable questions also "HasAns_exact", "HasAns_f1", "NoAns_exact" and "NoAns_f1".

    Raises:
        ConfigError: a question has no prediction.
    """
    missing = [example.id for example in examples if example.id not in predictions]
    if missing or not examples:
        raise ConfigError(f"{len(missing)} of {len(examples)} questions have no prediction, such as {missing[:3]}.")
    pairs = [(example, *scores(example, predictions[example.id])) for example in examples]
    metrics = _means("", [pair[1:] for pair in pairs])
    if has_impossible(examples):
        metrics |= _means("HasAns_", [pair[1:] for pair in pairs if pair[0].answers])
        metrics |= _means("NoAns_", [pair[1:] for pair in pairs if not pair[0].answers])
    return metrics


def _means(prefix: str, pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    if not pairs:
        return {}
    exact, overlap = (100 * sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return {f"{prefix}exact": exact, f"{prefix}f1": overlap}


def best_null_threshold(
    examples: Sequence[Example], answers: Mapping[str, str], null_scores: Mapping[str, float]
) -> tuple[float, float]:
    """The threshold on null scores with the largest F1, and that F1 in percent.

    Args:
        examples: questions with reference answers.
        answers: id -> best text that is not empty, whatever its score.
        null_scores: id -> score of "no answer" less that of the best answer; above the threshold it is no answer.
    """
    pairs = sorted(
        (null_scores[e.id], scores(e, answers[e.id])[1] - scores(e, "")[1]) for e in examples
    )  # from the question surest to have an answer
    total = sum(scores(e, "")[1] for e in examples)
    best, threshold = total, pairs[0][0] - 1.0
    for number, (score, gain) in enumerate(pairs):
        total += gain
        last_of_equals = number + 1 == len(pairs) or pairs[number + 1][0] > score
        if last_of_equals and total > best:
            best, threshold = total, score
    return threshold, 100 * best / len(examples)
