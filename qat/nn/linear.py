"""Linear layer with fake-quantized input and weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
from qat.nn.base import QuantMixin


class QuantLinear(QuantMixin, nn.Linear):
    """nn.Linear on a fake-quantized input (..., in) with a fake-quantized weight, per output row by default."""

    default_quant_desc_weight = QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; shapes as in nn.Linear."""
        return F.linear(self._input_quantizer(input), self._weight_quantizer(self.weight), self.bias)
