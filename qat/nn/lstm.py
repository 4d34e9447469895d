"""LSTM whose inputs, hidden states and weights are fake-quantized at every step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL
from qat.nn.base import QuantMixin
from qat.quantizer import QuantizerState, StateDict, TensorQuantizer

State = tuple[Tensor, Tensor]


def lstm_step(gates: Tensor, c: Tensor) -> State:
    """New hidden and cell state (N, H) from gates (N, 4H), in the order of nn.LSTM, and the cell state (N, H)."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def all_pass_through(module: nn.Module) -> bool:
    """True where every quantizer of the module passes through, so that torch's fused kernel computes the same."""
    quantizers = [child for child in module.children() if isinstance(child, TensorQuantizer)]
    return all(quantizer.state is QuantizerState.PASSTHROUGH for quantizer in quantizers)


def _suffixes(module: Any) -> list[str]:
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]


class QuantLSTM(QuantMixin, nn.LSTM):
    """nn.LSTM with four quantizers a layer and direction, named like the weights they belong to.

    `_input_l0_quantizer` and `_hidden_l0_quantizer` see the tensors multiplied by `weight_ih_l0` and
    `weight_hh_l0`, whose own quantizers are `_weight_ih_l0_quantizer` and `_weight_hh_l0_quantizer`; the other
    direction adds `_reverse` to `l0`. Cell state, biases and the projection `weight_hr` (proj_size) stay float.

    It runs one step after another, so a long sequence is slow and an exported graph is unrolled. Checkpoints of
    pytorch-quantization, which has one scale for input and hidden state together, load: both get it.
    """

    default_quant_desc_weight = QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL

    @classmethod
    def _quantizer_names(cls, module: nn.Module) -> tuple[list[str], list[str]]:
        suffixes = _suffixes(module)
        inputs = [f"_{kind}_{suffix}_quantizer" for suffix in suffixes for kind in ("input", "hidden")]
        weights = [f"_{kind}_{suffix}_quantizer" for suffix in suffixes for kind in ("weight_ih", "weight_hh")]
        return inputs, weights

    def forward(self, input: Any, hx: State | None = None) -> Any:
        """Output and (h_n, c_n); shapes as in nn.LSTM, for a batch, one sequence or a PackedSequence."""
        if all_pass_through(self):
            return nn.LSTM.forward(self, input, hx)
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"QuantLSTM takes a 2-D (one sequence) or 3-D (batch) input, not {input.dim()}-D.")
        batched = input.dim() == 3
        batch_dim = 0 if self.batch_first else 1
        x = input if batched else input.unsqueeze(batch_dim)
        if hx is None:
            hx = self._zero_state(x, x.size(batch_dim))
        else:
            if any(state.dim() != input.dim() for state in hx):
                raise RuntimeError(
                    f"QuantLSTM got a {input.dim()}-D input with initial states of {hx[0].dim()} and {hx[1].dim()} "
                    f"dimensions. Give both states {input.dim()} dimensions."
                )
            hx = hx if batched else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        self.check_forward_args(x, hx, None)
        output, (h, c) = self._run(x.transpose(0, 1) if self.batch_first else x, hx, None)
        output = output.transpose(0, 1) if self.batch_first else output
        if batched:
            return output, (h, c)
        return output.squeeze(batch_dim), (h.squeeze(1), c.squeeze(1))

    def _forward_packed(self, packed: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
        sizes: list[int] = packed.batch_sizes.tolist()
        hx = self._zero_state(packed.data, sizes[0]) if hx is None else self.permute_hidden(hx, packed.sorted_indices)
        self.check_forward_args(packed.data, hx, packed.batch_sizes)
        data, state = self._run(packed.data, hx, sizes)
        output = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        return output, self.permute_hidden(state, packed.unsorted_indices)

    def _zero_state(self, x: Tensor, batch: int) -> State:
        rows = len(_suffixes(self))
        h = x.new_zeros(rows, batch, self.proj_size or self.hidden_size)
        return h, x.new_zeros(rows, batch, self.hidden_size)

    def _run(self, x: Tensor, hx: State, sizes: list[int] | None) -> tuple[Tensor, State]:
        """All layers over time-first x: (T, N, F), or packed (sum of sizes, F)."""
        directions = 2 if self.bidirectional else 1
        suffixes = _suffixes(self)
        states: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for row in range(layer * directions, (layer + 1) * directions):
                output, state = self._run_direction(x, (hx[0][row], hx[1][row]), suffixes[row], sizes)
                outputs.append(output)
                states.append(state)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, (torch.stack([h for h, _ in states]), torch.stack([c for _, c in states]))

    def _run_direction(self, x: Tensor, state: State, suffix: str, sizes: list[int] | None) -> tuple[Tensor, State]:
        def part(name: str) -> Any:
            return getattr(self, name.replace("l*", suffix))

        w_ih = part("_weight_ih_l*_quantizer")(part("weight_ih_l*"))
        w_hh = part("_weight_hh_l*_quantizer")(part("weight_hh_l*"))
        b_ih, b_hh = (part("bias_ih_l*"), part("bias_hh_l*")) if self.bias else (None, None)
        w_hr = part("weight_hr_l*") if self.proj_size else None
        hidden_quantizer = part("_hidden_l*_quantizer")
        gates = F.linear(part("_input_l*_quantizer")(x), w_ih, b_ih)
        steps = gates.unbind(0) if sizes is None else torch.split(gates, sizes)
        h, c = state
        outputs: list[Tensor] = []
        for gate in reversed(steps) if suffix.endswith("_reverse") else steps:
            # Packed sequences are sorted by length: the first rows run, the others wait for their start or have ended.
            n = None if sizes is None else gate.size(0)
            new_h, new_c = lstm_step(gate + F.linear(hidden_quantizer(h[:n]), w_hh, b_hh), c[:n])
            new_h = new_h if w_hr is None else F.linear(new_h, w_hr)
            outputs.append(new_h)
            h, c = (new_h, new_c) if n is None else (torch.cat([new_h, h[n:]]), torch.cat([new_c, c[n:]]))
        if suffix.endswith("_reverse"):
            outputs.reverse()
        return (torch.stack(outputs) if sizes is None else torch.cat(outputs)), (h, c)

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: Any) -> None:
        for row, suffix in enumerate(_suffixes(self)):
            for old, new in (("input", ("input", "hidden")), ("weight", ("weight_ih", "weight_hh"))):
                amax = state_dict.pop(f"{prefix}_{old}_quantizers.{row}._amax", None)
                if amax is not None:
                    state_dict |= {f"{prefix}_{kind}_{suffix}_quantizer._amax": amax for kind in new}
        super()._load_from_state_dict(state_dict, prefix, *args)
