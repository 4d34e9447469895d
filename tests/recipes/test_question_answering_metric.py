"""Exact match and F1 on cases worked out by hand from the official definition."""

import pytest

from qat.errors import ConfigError
from recipes.qa_data import Answer, Example
from recipes.qa_metric import best_null_threshold, evaluate_answers, exact_match, f1, normalized


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("an apple, a day", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre and another", "theatre and another"),  # articles are words, not beginnings
        ("the-a", "thea"),  # punctuation goes first, so this is one word
        ("«the» café", "« » café"),  # only ASCII punctuation goes
        ("  The ", ""),
    ],
)
def test_normalization(text: str, expected: str) -> None:
    assert normalized(text) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "overlap"),
    [
        ("the Eiffel Tower", "Eiffel tower.", 1.0, 1.0),
        ("tall Eiffel Tower in Paris", "Eiffel Tower", 0.0, 2 * (2 / 5) * 1 / (2 / 5 + 1)),
        ("one one two", "one two two", 0.0, 2 / 3),  # bags: one once, two once
        ("Paris", "London", 0.0, 0.0),
        ("", "London", 0.0, 0.0),
        ("the", "a", 1.0, 1.0),
    ],
)
def test_exact_match_and_f1(prediction: str, reference: str, exact: float, overlap: float) -> None:
    assert exact_match(prediction, reference) == exact
    assert f1(prediction, reference) == pytest.approx(overlap)


def example(identity: str, *answers: str) -> Example:
    return Example(identity, "?", "context", tuple(Answer(a, 0) for a in answers), impossible=not answers)


def test_the_best_of_several_references_counts_for_each_metric() -> None:
    metrics = evaluate_answers([example("q", "big red house", "red house")], {"q": "the red house"})
    assert metrics == {"exact": 100.0, "f1": 100.0}
    metrics = evaluate_answers([example("q", "big red house", "red")], {"q": "red house"})
    assert metrics == {"exact": 0.0, "f1": pytest.approx(80.0)}


def test_unanswerable_questions_are_right_only_when_nothing_is_answered() -> None:
    examples = [example("a", "red"), example("b"), example("c")]
    metrics = evaluate_answers(examples, {"a": "red car", "b": "", "c": "blue"})
    assert metrics["exact"] == pytest.approx(100 / 3)
    assert metrics["f1"] == pytest.approx(100 * (2 / 3 + 1) / 3)
    assert metrics["HasAns_exact"] == 0.0 and metrics["HasAns_f1"] == pytest.approx(200 / 3)
    assert metrics["NoAns_exact"] == metrics["NoAns_f1"] == 50.0


def test_a_missing_prediction_is_named() -> None:
    with pytest.raises(ConfigError, match=r"1 of 2 questions have no prediction, such as \['b'\]"):
        evaluate_answers([example("a", "x"), example("b", "y")], {"a": "x"})


def test_the_best_null_threshold_is_found() -> None:
    examples = [example("a", "red"), example("b"), example("c", "blue"), example("d")]
    answers = {"a": "red", "b": "green", "c": "blue", "d": "pink"}
    threshold, score = best_null_threshold(examples, answers, {"a": -3.0, "b": 1.0, "c": -1.0, "d": 2.0})
    assert (threshold, score) == (-1.0, 100.0)
    # Where no answer is ever right, refusing every question is best.
    threshold, score = best_null_threshold(examples[1::2], answers, {"b": -5.0, "d": 2.0})
    assert threshold < -5.0 and score == 100.0


def test_the_threshold_never_splits_equal_scores() -> None:
    examples = [example("a", "red"), example("b")]
    threshold, score = best_null_threshold(examples, {"a": "red", "b": "green"}, {"a": 1.0, "b": 1.0})
    assert score == 50.0 and threshold in (0.0, 1.0)
