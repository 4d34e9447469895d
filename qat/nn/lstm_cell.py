"""One step of an LSTM with fake-quantized input, hidden state and weights."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
from qat.nn.base import QuantMixin
from qat.nn.lstm import State, all_pass_through, lstm_step
from qat.quantizer import StateDict, TensorQuantizer


class QuantLSTMCell(QuantMixin, nn.LSTMCell):
    """nn.LSTMCell with `_input_quantizer`, `_hidden_quantizer`, `_weight_ih_quantizer`, `_weight_hh_quantizer`.

    Cell state and biases stay float. A checkpoint of pytorch-quantization, which has one scale for input and
    hidden state and one for both weights, loads: both get it.
    """

    default_quant_desc_weight = QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL

    _hidden_quantizer: TensorQuantizer
    _weight_ih_quantizer: TensorQuantizer
    _weight_hh_quantizer: TensorQuantizer

    @classmethod
    def _quantizer_names(cls, module: nn.Module) -> tuple[list[str], list[str]]:
        return ["_input_quantizer", "_hidden_quantizer"], ["_weight_ih_quantizer", "_weight_hh_quantizer"]

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """New (h, c); shapes as in nn.LSTMCell: input (N, F) or (F,), states (N, H) or (H,)."""
        if all_pass_through(self):
            return nn.LSTMCell.forward(self, input, hx)
        if input.dim() not in (1, 2):
            raise ValueError(f"QuantLSTMCell takes a 1-D or 2-D input, not {input.dim()}-D.")
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros)
        w_ih = self._weight_ih_quantizer(self.weight_ih)
        w_hh = self._weight_hh_quantizer(self.weight_hh)
        gates = F.linear(self._input_quantizer(input), w_ih, self.bias_ih)
        return lstm_step(gates + F.linear(self._hidden_quantizer(hx[0]), w_hh, self.bias_hh), hx[1])

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: Any) -> None:
        weight = state_dict.pop(f"{prefix}_weight_quantizer._amax", None)
        if weight is not None:
            state_dict |= {f"{prefix}_weight_{kind}_quantizer._amax": weight for kind in ("ih", "hh")}
            shared = state_dict.get(f"{prefix}_input_quantizer._amax")
            if shared is not None:
                state_dict.setdefault(f"{prefix}_hidden_quantizer._amax", shared)
        super()._load_from_state_dict(state_dict, prefix, *args)
