"""SQuAD files, windows and the choice of spans."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qat.errors import ConfigError
from recipes.qa_config import QaDataConfig
from recipes.qa_data import Example, has_impossible, read_squad
from recipes.qa_features import Window, make_windows, padded
from recipes.qa_predict import predict, texts, write_predictions
from tiny_encoder import facts, make_tokenizer

SMALL = QaDataConfig(max_length=40, doc_stride=8, max_query_length=12, max_answer_length=6, n_best=5)


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def one(**changes: Any) -> dict[str, Any]:
    qa = {"id": "q", "question": "Who?", "answers": [{"text": "Ida", "answer_start": 3}], **changes}
    return {"data": [{"paragraphs": [{"context": "By Ida Moss.", "qas": [qa]}]}]}


def test_both_versions_are_read(tmp_path: Path) -> None:
    plain = read_squad(write(tmp_path / "1.json", facts(3, 0)), need_answers=True)
    assert len(plain) == 6 and not has_impossible(plain)
    assert all(e.context[a.start :].startswith(a.text) for e in plain for a in e.answers)
    second = read_squad(write(tmp_path / "2.json", facts(3, 0, unanswerable=True)), need_answers=True)
    assert len(second) == 9 and sum(e.impossible for e in second) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "'data' is missing"),
        ({"data": []}, "has no question"),
        ({"data": [{"paragraphs": "x"}]}, r"data\[0\]: 'paragraphs' is a str"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\].paragraphs\[0\]: 'context' is missing"),
        (one(question="  "), "the question of question 'q' is empty"),
        (one(id=None), r"qas\[0\]: 'id' is None"),
        (one(answers=[{"text": "Ida", "answer_start": 4}]), "does not have 'Ida' at character 4, but 'da '"),
        (one(answers=[{"text": "Ida", "answer_start": -9}]), "does not have 'Ida' at character -9"),
        (one(answers=[]), "has no answer and is not marked is_impossible"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_squad(write(tmp_path / "bad.json", content), need_answers=True)


def test_ids_twice_other_encodings_and_missing_files(tmp_path: Path) -> None:
    content = one()
    content["data"] *= 2
    with pytest.raises(ConfigError, match="'q' occurs twice"):
        read_squad(write(tmp_path / "twice.json", content))
    (tmp_path / "latin.json").write_bytes('{"data": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8: byte 10 is 0xe9"):
        read_squad(tmp_path / "latin.json")
    with pytest.raises(ConfigError, match="No such file"):
        read_squad(tmp_path / "nowhere.json")


def test_windows_cover_the_passage_and_mark_the_answer(tmp_path: Path) -> None:
    context = " ".join(p["context"] for p in facts(6, 5)["data"][0]["paragraphs"])
    content = facts(1, 4)["data"][0]["paragraphs"][0]
    context = f"{context} {content['context']}"
    answer = content["qas"][0]["answers"][0]["text"]
    tokenizer = make_tokenizer()
    raw = {"data": [{"paragraphs": [{"context": context, "qas": [{"id": "q", "question": "Who built it?", "answers": [
        {"text": answer, "answer_start": context.rindex(answer)}]}]}]}]}  # fmt: skip
    example = Example("q", "Who built it?", context, ())
    windows = make_windows([example], tokenizer, SMALL)
    assert len(windows) > 2 and max(len(w.input_ids) for w in windows) == SMALL.max_length
    readable = sorted(int(o[0]) for w in windows for o, r in zip(w.offsets, w.readable, strict=True) if r)
    whole = sorted({int(o[0]) for w in windows for o in w.offsets if o[0] >= 0})
    assert readable == whole, "every token of the passage is read from exactly one window"
    marked = make_windows(read_squad(write(tmp_path / "raw.json", raw)), tokenizer, SMALL)
    found = [w for w in marked if w.end]
    assert found and any(w.end == 0 for w in marked)
    for window in found:
        assert context[window.offsets[window.start, 0] : window.offsets[window.end, 1]] == answer


def test_long_questions_are_cut_at_a_token() -> None:
    tokenizer = make_tokenizer()
    long = "When was " * 20 + "it built?"
    window = make_windows([Example("q", long, "It was built in 1700.", ())], tokenizer, SMALL)[0]
    of_question = (window.token_type_ids == 0).sum() - 2
    assert of_question == SMALL.max_query_length


def hand_made(length: int = 8) -> tuple[Example, Window]:
    """Tokens 3.. are the words of "a b c d", the others are outside of the passage."""
    offsets = np.full((length, 2), -1)
    for n in range(4):
        offsets[3 + n] = (2 * n, 2 * n + 1)
    of_passage = offsets[:, 0] >= 0
    ids = np.arange(length)
    return Example("q", "?", "a b c d"), Window(0, ids, ids * 0, offsets, of_passage)


def logits(**values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    made = np.full(8, -5, np.float32)
    for name, value in values.items():
        made[int(name[1:])] = value
    return made


def test_spans_obey_order_length_and_passage() -> None:
    example, window = hand_made()
    start, end = logits(t1=50, t4=9.5, t5=8), logits(t2=50, t3=20, t6=7.25, t5=6)
    data = QaDataConfig(max_length=40, doc_stride=8, max_query_length=12, max_answer_length=2, n_best=4)
    prediction = predict([example], [window], [(start, end)], data)["q"]
    # t1 and t2 are no part of the passage, t3 ends before t4 begins, t4..t6 is longer than two tokens.
    assert prediction.text == "b c"
    assert [(c.text, c.score) for c in prediction.best[:3]] == [("b c", 15.5), ("c d", 15.25), ("a", 15)]
    assert sum(c.probability for c in prediction.best) == pytest.approx(1)
    shares = [c.probability for c in prediction.best]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] / shares[1] == pytest.approx(np.exp(prediction.best[0].score - prediction.best[1].score))


def test_no_answer_wins_by_more_than_the_threshold(tmp_path: Path) -> None:
    example, window = hand_made()
    start, end = logits(t0=6, t4=5), logits(t0=6, t5=5)
    settings = {"max_length": 40, "doc_stride": 8, "max_query_length": 12, "unanswerable": True}
    at = {
        t: predict([example], [window], [(start, end)], QaDataConfig(**settings, null_threshold=t))["q"] for t in (1, 2)
    }
    assert at[1].null_score == at[2].null_score == 2.0
    assert (at[1].text, at[2].text) == ("", "b c")
    assert at[1].best_span == "b c"
    answered = predict([example], [window], [(start, end)], QaDataConfig(**{**settings, "unanswerable": False}))["q"]
    assert answered.text == "b c" and all(c.text for c in answered.best)
    plain, n_best = write_predictions(tmp_path, {"q": at[1]})
    assert json.loads(plain.read_text()) == {"q": ""} == texts({"q": at[1]})
    assert json.loads(n_best.read_text())["q"][1]["text"] == "b c"


def test_no_answer_must_hold_in_every_window() -> None:
    example, window = hand_made()
    sure, unsure = (logits(t0=9), logits(t0=9)), (logits(t0=1, t4=2), logits(t0=1, t4=2))
    data = QaDataConfig(max_length=40, doc_stride=8, max_query_length=12, unanswerable=True)
    assert predict([example], [window, window], [sure, unsure], data)["q"].text == "b"


def test_padding() -> None:
    _, window = hand_made()
    short = Window(0, window.input_ids[:3], window.token_type_ids[:3], window.offsets[:3], window.readable[:3])
    batch = padded([window, short], ("input_ids", "attention_mask"), pad=7)
    assert batch["input_ids"].tolist()[1] == [0, 1, 2, 7, 7, 7, 7, 7]
    assert batch["attention_mask"].sum(1).tolist() == [8, 3]
    with pytest.raises(ConfigError, match="8 tokens does not fit into sequences of 4"):
        padded([window], ("input_ids",), pad=0, length=4)


def test_settings_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="leaves 6 tokens for the passage"):
        QaDataConfig(max_length=20, max_query_length=10)
    with pytest.raises(ConfigError, match="n_best=0 is below 1"):
        QaDataConfig(n_best=0)
