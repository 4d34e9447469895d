"""Add, Concat and Matmul as modules, placed by hand where a forward calls the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from qat.descriptor import QuantDescriptor
from qat.quantizer import TensorQuantizer


class QuantAdd(nn.Module):
    """Residual add: `input + other`, with the identity branch `other` fake-quantized.

    The branch that comes out of a convolution is left alone by default: TensorRT adds it inside the convolution,
    and a quantizer there costs a requantization.

    Args:
        quantize: "second" for `other` only, "both" for both operands, each with its own scale.
        quant_desc_input: descriptor of each quantized operand; None is INT8 per tensor.

    Raises:
        ValueError: another value of `quantize`.
    """

    def __init__(
        self, quantize: Literal["second", "both"] = "second", quant_desc_input: QuantDescriptor | None = None
    ) -> None:
        super().__init__()
        if quantize not in ("second", "both"):
            raise ValueError(f"quantize={quantize!r} of QuantAdd is unknown. Use 'second' (the identity) or 'both'.")
        self.quantize = quantize
        if quantize == "both":
            self._input_quantizer = TensorQuantizer(quant_desc_input)
        self._other_quantizer = TensorQuantizer(quant_desc_input)

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Sum of two tensors of shapes that broadcast; `other` is the identity branch."""
        if self.quantize == "both":
            input = self._input_quantizer(input)
        return torch.add(input, self._other_quantizer(other))

    def extra_repr(self) -> str:
        """Which operands are quantized, for print(model)."""
        return f"quantize={self.quantize!r}"


class QuantConcat(nn.Module):
    """Concatenation whose inputs share one quantizer: different scales would make TensorRT requantize.

    Args:
        dim: dimension to concatenate along.
        quant_desc_input: descriptor of the inputs; None is INT8 per tensor.
    """

    def __init__(self, dim: int = 1, quant_desc_input: QuantDescriptor | None = None) -> None:
        super().__init__()
        self.dim = dim
        self._input_quantizer = TensorQuantizer(quant_desc_input)

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors joined along `dim`; shapes as in torch.cat."""
        return torch.cat([self._input_quantizer(tensor) for tensor in tensors], self.dim)

    def extra_repr(self) -> str:
        """Dimension, for print(model)."""
        return f"dim={self.dim}"


class QuantMatmul(nn.Module):
    """Product of two activations, both fake-quantized, as in attention.

    For softmax(...) @ V, give the first factor `QuantDescriptor(amax=1.0)`: a softmax is never above 1.

    Args:
        quant_desc_input: descriptor of the first factor; None is INT8 per tensor.
        quant_desc_other: descriptor of the second factor; None is INT8 per tensor.
    """

    def __init__(
        self, quant_desc_input: QuantDescriptor | None = None, quant_desc_other: QuantDescriptor | None = None
    ) -> None:
        super().__init__()
        self._input_quantizer = TensorQuantizer(quant_desc_input)
        self._other_quantizer = TensorQuantizer(quant_desc_other)

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Matrix product; shapes as in torch.matmul."""
        return torch.matmul(self._input_quantizer(input), self._other_quantizer(other))
