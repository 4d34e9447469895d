"""A small BERT with a tokenizer of its own, and questions about made-up facts that it can learn on a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

BUILDERS = ["Anna Keller", "Tom Reed", "Ida Moss", "Karl Weiss", "Nora Lind", "Paul Stone", "Eva Brandt", "Jon Hale"]
PLACES = ["Lurn", "Ostby", "Marl", "Vintal", "Quell", "Harn", "Dovel", "Rusk"]
THINGS = ["bridge", "tower", "harbour", "mill", "church", "market"]


def facts(count: int, seed: int, unanswerable: bool = False) -> dict[str, Any]:
    """SQuAD content: `count` passages of three facts with a question each, or with none of the answers in it."""
    rng = random.Random(seed)
    paragraphs = []
    for number in range(count):
        thing, place, builder = rng.choice(THINGS), rng.choice(PLACES), rng.choice(BUILDERS)
        year = str(rng.randrange(1600, 1999))
        context = f"The {thing} of {place} is well known. It was built in {year} by {builder}, who lived near {place}."
        asked = {f"Who built the {thing} of {place}?": builder, f"When was the {thing} built?": year}
        qas: list[dict[str, Any]] = [
            {"id": f"{seed}-{number}-{n}", "question": q, "answers": [{"text": a, "answer_start": context.index(a)}]}
            for n, (q, a) in enumerate(asked.items())
        ]
        if unanswerable:
            qas.append(
                {"id": f"{seed}-{number}-none", "question": "How tall is it?", "answers": [], "is_impossible": True}
            )
        paragraphs.append({"context": context, "qas": qas})
    return {"version": "v2.0" if unanswerable else "1.1", "data": [{"title": "facts", "paragraphs": paragraphs}]}


def write_facts(folder: Path, unanswerable: bool = False) -> Path:
    """train.json and dev.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", 48, 1), ("dev", 12, 2)):
        (folder / f"{name}.json").write_text(json.dumps(facts(count, seed, unanswerable)))
    return folder


def make_tokenizer() -> Any:
    """WordPiece with every word and digit of the facts."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    texts = [p["context"] for p in facts(200, 3)["data"][0]["paragraphs"]]
    texts += [qa["question"] for p in facts(50, 3, True)["data"][0]["paragraphs"] for qa in p["qas"]]
    words = sorted({w for text in texts for w in "".join(c if c.isalpha() else " " for c in text.lower()).split()})
    digits = [f"{n:02}" for n in range(100)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", ",", "?", *words, *digits, *(f"##{d}" for d in digits)]
    tokenizer = Tokenizer(models.WordPiece({p: n for n, p in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def write_encoder(folder: Path, **changes: Any) -> Path:
    """A folder that `from_pretrained` reads: two layers, width 64, random weights."""
    import torch

    tokenizer = make_tokenizer()
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    torch.manual_seed(0)
    settings = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=96, hidden_dropout_prob=0.0, **{**settings, **changes}
    )
    transformers.BertForQuestionAnswering(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
