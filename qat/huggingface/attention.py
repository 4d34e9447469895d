"""Attention of transformers' encoders as a module of the model, where `qat.prepare` finds it.

transformers computes attention in functions that it looks up by name: the one behind "sdpa" ends in a fused kernel and
the one behind "eager" has no place for a quantizer. Here a third one is registered. It hands queries, keys and values
to a submodule of the attention layer, whose only line is torch's scaled_dot_product_attention. That line is an
operation like any other to the rules of placement: in INT8 as a whole, or left float as a whole.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.errors import ConfigError
from qat.huggingface.package import load_transformers
from qat.placement.attention import MASKED
from qat.placement.prepare import prepare as place
from qat.placement.tracing import call_arguments, run_once

ATTENTION = "qat"
"""Name of the attention implementation in transformers."""
_CHILD = "core_attention"
_OF_DECODERS = ("past_key_values", "cache", "softcap", "s_aux", "position_bias")
Model = TypeVar("Model", bound=nn.Module)


class EncoderAttention(nn.Module):
    """Scaled dot-product attention over all tokens that are not padding."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None
    ) -> Tensor:
        """Context (N, L, H, V) of query (N, H, L, E), key (N, H, S, E), value (N, H, S, V); mask is added to scores."""
        context = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
        return context.transpose(1, 2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in the place of its own attention; the layer's submodule is made at the first call.

    Raises:
        ConfigError: an attention that is causal or has more to it than a mask.
    """
    used = [name for name in _OF_DECODERS if options.get(name) is not None]
    causal = options.get("is_causal")
    if used or (getattr(module, "is_causal", False) if causal is None else causal):
        raise ConfigError(
            f"{type(module).__name__} computes {', '.join(used) or 'causal attention'}, which qat.huggingface does not "
            "quantize: it is for encoders. Call qat.prepare(model, ...), which leaves that attention float."
        )
    if _CHILD not in module._modules:
        module.add_module(_CHILD, EncoderAttention())
        module.register_forward_pre_hook(check_implementation)
    context: Tensor = module.get_submodule(_CHILD)(query, key, value, attention_mask, dropout, scaling)
    return context, None


def check_implementation(module: nn.Module, _args: Any = None) -> None:
    """Refuse to run an attention whose quantizers another implementation would skip.

    Raises:
        ConfigError: the attention implementation was changed after `prepare`.
    """
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", ATTENTION)
    if chosen != ATTENTION:
        raise ConfigError(
            f"the attention implementation was set to {chosen!r} after the model was prepared: its kernel skips the "
            f"quantizers inside {type(module).__name__}. Call model.set_attn_implementation({ATTENTION!r})."
        )


def padding_mask(
    *, mask_function: Any, attention_mask: Tensor | None = None, dtype: torch.dtype = torch.float32, **_: Any
) -> Tensor | None:
    """What is added to the scores (N, 1, 1, S): 0 for tokens, MASKED for padding; None without a mask.

    Raises:
        ConfigError: the model asks for a mask that is more than padding.
    """
    if mask_function is not load_transformers("masking_utils").bidirectional_mask_function:
        raise ConfigError("the model masks more than padding (causal or windowed attention): it is not an encoder.")
    if attention_mask is None:
        return None
    kept = attention_mask[:, None, None, :].to(torch.bool)
    return torch.zeros_like(kept, dtype=dtype).masked_fill(kept.logical_not(), MASKED)


def expose_attention_(model: nn.Module, example_inputs: Any) -> list[str]:
    """Make the attention of every layer a submodule, in place; the model computes what it did.

    Args:
        model: a `PreTrainedModel`, or a module with such models inside.
        example_inputs: as for `qat.prepare`; the model is run once on them.

    Returns:
        Names of the submodules; none where the model does not use transformers' attention interface, and then keeps
        its implementation.

    Raises:
        ConfigError: transformers is missing, or the attention is not that of an encoder.
    """
    transformers = load_transformers()
    transformers.AttentionInterface.register(ATTENTION, attend)
    load_transformers("masking_utils").AttentionMaskInterface.register(ATTENTION, padding_mask)
    roots = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    before = [(root, root.config._attn_implementation) for root in roots]
    for root in roots:
        root.set_attn_implementation(ATTENTION)
    args, kwargs = call_arguments(example_inputs)
    run_once(model, args, kwargs)
    found = [name for name, module in model.named_modules() if isinstance(module, EncoderAttention)]
    for root, implementation in before if not found else ():
        root.set_attn_implementation(implementation)
    return found


def prepare(model: Model, example_inputs: Any, **options: Any) -> Model:
    """`qat.prepare` for an encoder of transformers: its attention is quantized too, in one piece or not at all.

    The fused attention kernel runs where the products stay float, and cannot come back by itself where they do not:
    another attention implementation, set later, is refused with an error when the model runs. Dropout on attention
    probabilities stays in training; attention weights are not returned.

    Args:
        model: float BERT, RoBERTa, DistilBERT, MiniLM, ELECTRA or alike, with any head; changed in place.
        example_inputs: as for `qat.prepare`, with the longest sequence in use: over 512 tokens attention stays float.
        options: the other arguments of `qat.prepare`. The attention of a layer is `<layer>.core_attention`, so
            exclude="*.core_attention*" leaves it float everywhere.

    Returns:
        The same object.

    Raises:
        ConfigError: as for `qat.prepare` and `expose_attention_`.
    """
    expose_attention_(model, example_inputs)
    return place(model, example_inputs, **options)
