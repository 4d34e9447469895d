"""Convolutions with fake-quantized input and weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from qat.descriptor import (
    QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_WEIGHT_PER_TENSOR,
)
from qat.nn.base import QuantMixin


class _QuantConv(QuantMixin):
    """One weight scale per output channel by default. Input and weight are quantized before any padding."""

    default_quant_desc_weight = QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL

    def forward(self, input: Tensor) -> Tensor:
        """Convolve; shapes as in the torch class."""
        m: Any = self
        y: Tensor = m._conv_forward(self._input_quantizer(input), self._weight_quantizer(m.weight), m.bias)
        return y


class QuantConv1d(_QuantConv, nn.Conv1d):
    """nn.Conv1d on a fake-quantized input (N, C, L), weight fake-quantized per output channel by default."""


class QuantConv2d(_QuantConv, nn.Conv2d):
    """nn.Conv2d on a fake-quantized input (N, C, H, W), weight fake-quantized per output channel by default."""


class QuantConv3d(_QuantConv, nn.Conv3d):
    """nn.Conv3d on a fake-quantized input (N, C, D, H, W), weight fake-quantized per output channel by default."""


class _QuantConvTranspose(QuantMixin):
    """Per-tensor weight scale by default: TensorRT runs a ConvTranspose with per-channel scales in float."""

    default_quant_desc_weight = QUANT_DESC_8BIT_WEIGHT_PER_TENSOR
    int8_weight_axes: ClassVar[tuple[int, ...]] = ()

    def _transposed(
        self, operator: Callable[..., Tensor], dims: int, input: Tensor, output_size: list[int] | None
    ) -> Tensor:
        m: Any = self
        geometry = (m.stride, m.padding, m.kernel_size, dims, m.dilation)
        output_padding = m._output_padding(input, output_size, *geometry)
        weight = self._weight_quantizer(m.weight)
        x = self._input_quantizer(input)
        return operator(x, weight, m.bias, m.stride, m.padding, output_padding, m.groups, m.dilation)


class QuantConvTranspose1d(_QuantConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d on a fake-quantized input with a fake-quantized weight, per-tensor by default."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolve; shapes as in nn.ConvTranspose1d."""
        return self._transposed(F.conv_transpose1d, 1, input, output_size)


class QuantConvTranspose2d(_QuantConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d on a fake-quantized input with a fake-quantized weight, per-tensor by default."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolve; shapes as in nn.ConvTranspose2d."""
        return self._transposed(F.conv_transpose2d, 2, input, output_size)


class QuantConvTranspose3d(_QuantConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d on a fake-quantized input with a fake-quantized weight, per-tensor by default."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolve; shapes as in nn.ConvTranspose3d."""
        return self._transposed(F.conv_transpose3d, 3, input, output_size)
