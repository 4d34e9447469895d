"""SQuAD v1.1 and v2.0 files: reading them, and saying what is wrong with one.

The layout is that of Rajpurkar et al. 2016 and 2018: {"data": [{"paragraphs": [{"context", "qas": [{"id", "question",
"answers": [{"text", "answer_start"}], "is_impossible"}]}]}]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qat.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """A reference answer: its text, and where in the passage it begins, in characters."""

    text: str
    start: int


@dataclass(frozen=True)
class Example:
    """A question about a passage.

    Attributes:
        id: unique in the file.
        question: the question.
        context: the passage.
        answers: reference answers; none where there is no answer, or the file has none.
        impossible: the passage does not answer it (SQuAD v2.0).
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = field(default=())
    impossible: bool = False


def read_text(path: str | Path) -> str:
    """A UTF-8 file.

    Raises:
        ConfigError: missing, or not UTF-8.
    """
    file = Path(path)
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Convert it to UTF-8 first."
        ) from error


def read_squad(path: str | Path, need_answers: bool = False) -> list[Example]:
    """Every question of a SQuAD file, in the file's order.

    Args:
        path: a JSON file in the layout of SQuAD v1.1 or v2.0.
        need_answers: refuse questions that have neither an answer nor `is_impossible`.

    Raises:
        ConfigError: not readable, not JSON, not in that layout, an id twice, an empty passage or question, or an
            answer that is not where the file says; the message names the place.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}. Give a SQuAD v1.1 or v2.0 file.") from error
    examples: list[Example] = []
    seen: set[str] = set()
    for example in _examples(_entry(content, "data", list, str(path)), str(path)):
        if example.id in seen:
            raise ConfigError(f"{path}: the id {example.id!r} occurs twice. Ids must be unique.")
        if need_answers and not example.answers and not example.impossible:
            raise ConfigError(f"{path}: question {example.id!r} has no answer and is not marked is_impossible.")
        seen.add(example.id)
        examples.append(example)
    if not examples:
        raise ConfigError(f"{path} has no question.")
    return examples


def has_impossible(examples: Sequence[Example]) -> bool:
    """Whether some questions have no answer: SQuAD v2.0."""
    return any(example.impossible for example in examples)


def _entry(holder: Any, key: str, kind: type, where: str) -> Any:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{where}: '{key}' is {found}, and should be a {kind.__name__}. Is it a SQuAD file?")
    return value


def _examples(articles: Sequence[Any], path: str) -> Iterator[Example]:
    for a, article in enumerate(articles):
        where = f"{path}: data[{a}]"
        for p, paragraph in enumerate(_entry(article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{p}]"
            context = _entry(paragraph, "context", str, place)
            for q, qa in enumerate(_entry(paragraph, "qas", list, place)):
                yield _example(qa, context, f"{place}.qas[{q}]")


def _example(qa: Any, context: str, where: str) -> Example:
    question = _entry(qa, "question", str, where)
    identity = qa.get("id")
    if not isinstance(identity, str | int):
        raise ConfigError(f"{where}: 'id' is {identity!r}, and should be a text.")
    for name, text in (("context", context), ("question", question)):
        if not text.strip():
            raise ConfigError(f"{where}: the {name} of question {identity!r} is empty.")
    impossible = bool(qa.get("is_impossible", False))
    found = [] if impossible else qa.get("answers") or []
    if not isinstance(found, list):
        raise ConfigError(f"{where}: 'answers' is a {type(found).__name__}, and should be a list.")
    answers = tuple(_answer(entry, context, f"{where}.answers[{n}]") for n, entry in enumerate(found))
    return Example(str(identity), question, context, answers, impossible)


def _answer(entry: Any, context: str, where: str) -> Answer:
    answer = Answer(_entry(entry, "text", str, where), _entry(entry, "answer_start", int, where))
    end = answer.start + len(answer.text)
    if not answer.text or answer.start < 0 or context[answer.start : end] != answer.text:
        raise ConfigError(
            f"{where}: the passage does not have {answer.text!r} at character {answer.start}, but "
            f"{context[max(answer.start, 0) : max(end, 0)]!r}."
        )
    return answer
