"""Windows of tokens: what the encoder sees of a question and a part of its passage.

A passage longer than a window is cut into several, which overlap (Devlin et al. 2018). A token in several windows is
read from the one in which it has the most context on its poorer side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from qat.errors import ConfigError
from recipes.qa_config import QaDataConfig
from recipes.qa_data import Example

_CHUNK = 1000
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """One window, of L tokens without padding.

    Attributes:
        example: number of its question.
        input_ids: (L,).
        token_type_ids: (L,), 1 for the passage where the encoder tells them apart.
        offsets: (L, 2), characters of the passage, first and behind the last; -1 for tokens outside of it.
        readable: (L,), tokens of the passage that have their best context here.
        start: first token of the answer; 0, the special token in front, where the window has none.
        end: last token of the answer, likewise.
    """

    example: int
    input_ids: Ints
    token_type_ids: Ints
    offsets: Ints
    readable: NDArray[np.bool_]
    start: int = 0
    end: int = 0


def question_tokens(tokenizer: Any, question: str) -> list[tuple[int, int]]:
    """Where the tokens of a question are in it."""
    encoded = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def make_windows(examples: Sequence[Example], tokenizer: Any, data: QaDataConfig) -> list[Window]:
    """Windows of every question, in order; questions are cut to `data.max_query_length` tokens."""
    return [w for first in range(0, len(examples), _CHUNK) for w in _windows_of(first, examples, tokenizer, data)]


def _windows_of(first: int, examples: Sequence[Example], tokenizer: Any, data: QaDataConfig) -> Iterator[Window]:
    chunk = examples[first : first + _CHUNK]
    questions = [_cut(tokenizer, example.question.strip(), data.max_query_length) for example in chunk]
    encoded = tokenizer(
        questions,
        [example.context for example in chunk],
        truncation="only_second",
        max_length=data.max_length,
        stride=data.doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding=False,
    )
    windows: dict[int, list[Window]] = {}
    for number, encoding in enumerate(encoded.encodings):
        index = int(encoded["overflow_to_sample_mapping"][number])
        of_passage = np.array([part == 1 for part in encoding.sequence_ids])
        offsets = np.where(of_passage[:, None], np.asarray(encoding.offsets, np.int64), -1)
        start, end = _answer_tokens(chunk[index], offsets, of_passage)
        ids, types = (np.asarray(values, np.int64) for values in (encoding.ids, encoding.type_ids))
        windows.setdefault(index, []).append(Window(first + index, ids, types, offsets, of_passage, start, end))
    for index in sorted(windows):
        yield from _readable(windows[index])


def _cut(tokenizer: Any, question: str, length: int) -> str:
    if len(question) <= length:  # a token has at least one character
        return question
    tokens = question_tokens(tokenizer, question)
    return question if len(tokens) <= length else question[: tokens[length - 1][1]]


def _answer_tokens(example: Example, offsets: Ints, of_passage: NDArray[np.bool_]) -> tuple[int, int]:
    """First and last token of the first reference answer, (0, 0) where it is not whole in the window."""
    tokens = np.flatnonzero(of_passage)
    if not example.answers or not len(tokens):
        return 0, 0
    begin, behind = example.answers[0].start, example.answers[0].start + len(example.answers[0].text)
    starts, ends = offsets[tokens, 0], offsets[tokens, 1]
    if begin < starts[0] or behind > ends[-1]:
        return 0, 0
    start = int(np.searchsorted(starts, begin, "right")) - 1
    end = int(np.searchsorted(ends, behind, "left"))
    return (int(tokens[start]), int(tokens[end])) if start <= end else (0, 0)


def _readable(windows: list[Window]) -> list[Window]:
    """The windows of one question, with `readable` off for tokens that have more context in another one."""
    if len(windows) == 1:
        return windows
    best: dict[int, tuple[float, int]] = {}
    for number, window in enumerate(windows):
        tokens = np.flatnonzero(window.readable)
        for place, token in enumerate(tokens):
            context = min(place, len(tokens) - 1 - place) + 0.01 * len(tokens)
            begin = int(window.offsets[token, 0])
            if context > best.get(begin, (-1.0, 0))[0]:
                best[begin] = (context, number)
    chosen = []
    for number, window in enumerate(windows):
        mine = [bool(r) and best[int(o[0])][1] == number for r, o in zip(window.readable, window.offsets, strict=True)]
        chosen.append(Window(**{**vars(window), "readable": np.array(mine)}))
    return chosen


def padded(windows: Sequence[Window], names: Sequence[str], pad: int, length: int | None = None) -> dict[str, Ints]:
    """A batch: the inputs of these names, (N, length), padded on the right; to the longest window without `length`.

    Raises:
        ConfigError: a window is longer than `length`.
    """
    longest = max(len(window.input_ids) for window in windows)
    length = longest if length is None else length
    if longest > length:
        raise ConfigError(f"a window of {longest} tokens does not fit into sequences of {length}.")
    batch = {name: np.full((len(windows), length), pad if name == "input_ids" else 0, np.int64) for name in names}
    for row, window in enumerate(windows):
        size = len(window.input_ids)
        values: Mapping[str, Any] = {**vars(window), "attention_mask": 1}
        for name in names:
            batch[name][row, :size] = values[name]
    return batch


class TrainWindows(Dataset[Window]):
    """Windows with answers for `make_loader`; `collate` makes (inputs, start, end) of a list."""

    def __init__(self, windows: Sequence[Window], names: Sequence[str], pad: int) -> None:
        self.windows, self.names, self.pad = windows, tuple(names), pad

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Window:
        return self.windows[index]

    def collate(self, windows: list[Window]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Inputs (N, L) by name, first and last token of each answer (N,); L is a multiple of 8 for tensor cores."""
        length = -(-max(len(window.input_ids) for window in windows) // 8) * 8
        inputs = {n: torch.from_numpy(a) for n, a in padded(windows, self.names, self.pad, length).items()}
        return inputs, torch.tensor([w.start for w in windows]), torch.tensor([w.end for w in windows])
