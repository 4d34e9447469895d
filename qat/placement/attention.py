"""Attention with the products inside it in reach of quantizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.descriptor import QUANT_DESC_8BIT_PER_TENSOR, QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL, QuantDescriptor
from qat.quantizer import QuantizerState, TensorQuantizer

MASKED = -10000.0
"""Score of what is masked: its exponential is zero in float32, and unlike -inf it is finite in float16 and leaves a row
that is masked as a whole (a sample that is all padding) without NaN, as torch's fused attention does."""


def softmax_descriptor(desc: QuantDescriptor) -> QuantDescriptor:
    """The same descriptor with amax fixed at 1: a softmax is never above it, so its scale is 1/127."""
    return replace(desc, amax=1.0, calib_method="max", learn_amax=False)


def _passes(*quantizers: TensorQuantizer) -> bool:
    return all(q.state is QuantizerState.PASSTHROUGH for q in quantizers)


class QuantAttention(nn.Module):
    """F.scaled_dot_product_attention with queries, keys, softmax and values fake-quantized.

    The fused kernel never shows its softmax, so the products are written out; where all quantizers pass through, the
    fused kernel runs and gives what it gave before.

    Args:
        desc: descriptor of queries, keys and values; None is INT8 per tensor.
    """

    def __init__(self, desc: QuantDescriptor | None = None) -> None:
        super().__init__()
        desc = desc or QUANT_DESC_8BIT_PER_TENSOR
        self._query_quantizer = TensorQuantizer(desc)
        self._key_quantizer = TensorQuantizer(desc)
        self._softmax_quantizer = TensorQuantizer(softmax_descriptor(desc))
        self._value_quantizer = TensorQuantizer(desc)

    def quantizers(self) -> tuple[TensorQuantizer, ...]:
        """The four of them."""
        return self._query_quantizer, self._key_quantizer, self._softmax_quantizer, self._value_quantizer

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of query (..., L, E) over key (..., S, E) and value (..., S, V); arguments as in torch."""
        if _passes(*self.quantizers()):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return self.products(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[0]

    def products(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The result (..., L, V) and the probabilities (..., L, S), before they are quantized."""
        if enable_gqa:
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        scores = self._query_quantizer(query) @ self._key_quantizer(key).transpose(-2, -1) * scale
        if is_causal:
            allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(allowed.logical_not(), MASKED)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(mask.logical_not(), MASKED)
        elif mask is not None:
            scores = scores + mask.clamp_min(MASKED)
        probabilities = F.dropout(scores.softmax(-1), dropout_p, dropout_p > 0)
        return self._softmax_quantizer(probabilities) @ self._value_quantizer(value), probabilities


def multihead_obstacle(module: nn.Module) -> str | None:
    """Why an nn.MultiheadAttention stays float, None where it need not."""
    m: Any = module
    if type(module).forward is not nn.MultiheadAttention.forward:
        return f"{type(module).__name__} is a subclass of nn.MultiheadAttention with its own forward"
    if m.bias_k is not None or m.bias_v is not None or m.add_zero_attn:
        return "nn.MultiheadAttention with add_bias_kv or add_zero_attn has no quantized form"
    return None


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class QuantMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention with its projections and, where wanted, the products between them fake-quantized.

    torch's own forward reads every weight directly, in one fused call, past any quantizer; this one does the same
    sums step by step. Parameters keep their keys. Where all quantizers pass through, torch's forward runs.
    """

    _input_quantizer: TensorQuantizer
    _key_input_quantizer: TensorQuantizer
    _value_input_quantizer: TensorQuantizer
    _out_proj_input_quantizer: TensorQuantizer
    _out_proj_weight_quantizer: TensorQuantizer
    _attention: QuantAttention

    @classmethod
    def convert_(
        cls,
        module: nn.MultiheadAttention,
        desc: QuantDescriptor | None,
        weight_desc: QuantDescriptor | None,
        joint: bool,
    ) -> Self:
        """Make a module an instance of this class in place.

        Args:
            module: one that `multihead_obstacle` has nothing against.
            joint: queries, keys and values are projected from one tensor, by one product; else by three.
            desc: descriptor of activations; None is INT8 per tensor.
            weight_desc: descriptor of weights; None is INT8 per row.
        """
        weight_desc = weight_desc or QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
        module.__class__ = cls
        m: Any = module
        for name in ("_input", "_key_input", "_value_input", "_out_proj_input"):
            m.add_module(f"{name}_quantizer", TensorQuantizer(desc))
        for name in ("in_proj", "out_proj") if joint else (*_PROJECTIONS, "out_proj"):
            m.add_module(f"_{name}_weight_quantizer", TensorQuantizer(weight_desc))
        m._attention = QuantAttention(desc)
        for quantizer in m.modules():
            if isinstance(quantizer, TensorQuantizer):
                quantizer.to(m.out_proj.weight.device).train(m.training)
        assert isinstance(module, cls)
        return module

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values as (N, H, L, E / H)."""
        m: Any = self
        heads = (self.num_heads, self.head_dim)
        if hasattr(m, "_in_proj_weight_quantizer") and query is key and key is value:
            x = self._batch_first(m._input_quantizer(query))
            qkv = F.linear(x, m._in_proj_weight_quantizer(m.in_proj_weight), m.in_proj_bias)
            # Split by reshaping: TensorRT moves a slice of the last dimension into the weights, and so out of INT8.
            return qkv.reshape(*x.shape[:2], 3, *heads).permute(2, 0, 3, 1, 4).unbind(0)
        biases = [None] * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
        inputs = m._input_quantizer(query), m._key_input_quantizer(key), m._value_input_quantizer(value)
        projected = (
            F.linear(self._batch_first(x), w, b) for x, w, b in zip(inputs, self._weights(), biases, strict=True)
        )
        return [y.reshape(*y.shape[:2], *heads).transpose(1, 2) for y in projected]

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _weights(self) -> Sequence[Tensor]:
        """Weights of queries, keys and values, fake-quantized."""
        m: Any = self
        if hasattr(m, "_in_proj_weight_quantizer"):
            return m._in_proj_weight_quantizer(m.in_proj_weight).chunk(3)  # type: ignore[no-any-return]
        size = m.embed_dim
        plain = [m.in_proj_weight[i * size : (i + 1) * size] if m._qkv_same_embed_dim else getattr(m, f"{n}_weight")
                 for i, n in enumerate(_PROJECTIONS)]  # fmt: skip
        return [getattr(m, f"_{n}_weight_quantizer")(w) for n, w in zip(_PROJECTIONS, plain, strict=True)]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, with need_weights, attention weights; shapes as in nn.MultiheadAttention."""
        if _passes(*(m for m in self.modules() if isinstance(m, TensorQuantizer))):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        batched = query.dim() == 3
        q, k, v = self._heads(query, key, value)
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        mask = _joined_mask(attn_mask, key_padding_mask, self.num_heads, q.dtype)
        dropout = self.dropout if self.training else 0.0
        if need_weights or not _passes(*self._attention.quantizers()):
            context, weights = self._attention.products(q, k, v, mask, dropout)
        else:
            context, weights = self._attention(q, k, v, mask, dropout), q
        context = self._out_proj_input_quantizer(context.transpose(1, 2).flatten(2))
        out = F.linear(context, self._out_proj_weight_quantizer(self.out_proj.weight), self.out_proj.bias)
        weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            out, weights = out.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights if need_weights else None


def _joined_mask(attn: Tensor | None, padding: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """One mask to add, from nn.MultiheadAttention's two (True is masked); it broadcasts to (N, H, L, S)."""
    joined: Tensor | None = None
    if attn is not None:
        joined = attn.reshape(-1, heads, *attn.shape[1:]) if attn.dim() == 3 else attn
        joined = _additive(joined, dtype)
    if padding is not None:
        added = _additive(padding, dtype)[:, None, None, :]
        joined = added if joined is None else joined + added
    return joined


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, MASKED)
    return mask
