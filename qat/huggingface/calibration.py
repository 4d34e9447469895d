"""Calibration of sequences: what quantizers see of a padded batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import CalibrationError


def run_unpadded(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Any]:
    """Run a padded batch so that no quantizer collects padding: sequences of one length together, cut to it.

        qat.calibrate(model, batches, method="entropy", forward=qat.huggingface.run_unpadded)

    Padding tokens have activations as well, often of another range, in every linear layer; attention masks them only
    as keys. The batch is the encoder's keyword arguments; what it returns for tokens does not depend on padding.

    Args:
        model: takes the batch as keyword arguments.
        batch: tensors (N, L, ...), one of them `attention_mask` (N, L): 1 for tokens, then 0 for padding.

    Returns:
        The outputs, one for each length.

    Raises:
        CalibrationError: there is no attention mask, an empty sequence, or padding in front of tokens.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        raise CalibrationError(
            f"the calibration batch has {', '.join(batch) or 'nothing'} but no attention_mask, which tells tokens from "
            "padding. Give the tokenizer's attention_mask."
        )
    lengths = mask.sum(1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    if bool((mask.bool() != (columns < lengths[:, None])).any()) or not bool(lengths.all()):
        raise CalibrationError(
            "a calibration sequence is empty, or has padding in front of tokens. Set tokenizer.padding_side = 'right'."
        )
    outputs = []
    for length in sorted(set(lengths.tolist())):
        rows = lengths == length
        outputs.append(model(**{name: tensor[rows, :length] for name, tensor in batch.items()}))
    return outputs
