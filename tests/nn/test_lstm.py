import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import qat.nn as qnn
from qat.descriptor import QuantDescriptor
from qat.quantizer import QuantizerState, named_quantizers, set_quantizer_state
from quant_cases import assert_same, calibrate, reference

OPTIONS = [
    {},
    {"num_layers": 3, "bias": False},
    {"bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "proj_size": 3},
    {"num_layers": 2, "proj_size": 2, "batch_first": True},
]


def _twins(**options) -> tuple[nn.LSTM, qnn.QuantLSTM]:
    """A float LSTM and its quant twin in the calibrating state, which runs our own steps without rounding."""
    plain, quant = nn.LSTM(4, 5, **options), qnn.QuantLSTM(4, 5, **options)
    quant.load_state_dict(plain.state_dict(), strict=False)
    set_quantizer_state(quant, QuantizerState.CALIBRATING)
    return plain, quant


def _state(lstm: nn.LSTM, *batch: int) -> tuple[Tensor, Tensor]:
    rows = lstm.num_layers * (2 if lstm.bidirectional else 1)
    return torch.randn(rows, *batch, lstm.proj_size or 5), torch.randn(rows, *batch, 5)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("kind", ["batch", "one sequence", "packed"])
def test_own_steps_equal_torch(options, given_state: bool, kind: str) -> None:
    plain, quant = _twins(**options)
    batch = () if kind == "one sequence" else (3,)
    hx = _state(plain, *batch) if given_state else None
    if kind == "packed":
        x = pack_sequence([torch.randn(length, 4) for length in (2, 6, 4)], enforce_sorted=False)
    elif kind == "batch":
        x = torch.randn(3, 7, 4) if quant.batch_first else torch.randn(7, 3, 4)
    else:
        x = torch.randn(7, 4)
    (actual, actual_state), (expected, expected_state) = quant(x, hx), plain(x, hx)
    if kind == "packed":
        actual, lengths = pad_packed_sequence(actual)
        expected, expected_lengths = pad_packed_sequence(expected)
        assert torch.equal(lengths, expected_lengths)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_state, expected_state)


def test_own_steps_have_the_gradients_of_torch() -> None:
    plain, quant = _twins(num_layers=2, bidirectional=True)
    x = torch.randn(7, 3, 4)
    for lstm in (plain, quant):
        output, (_, c_n) = lstm(x)
        (output.square().sum() + c_n.sum()).backward()
    for (name, parameter), other in zip(plain.named_parameters(), quant.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_dropout_only_between_layers_while_training() -> None:
    plain, quant = _twins(num_layers=2, dropout=0.5)
    x = torch.randn(7, 3, 4)
    outputs = []
    for lstm in (plain, quant):
        torch.manual_seed(1)
        outputs.append(lstm(x)[0])
    torch.testing.assert_close(*outputs)
    assert not torch.equal(quant(x)[0], outputs[1])
    torch.testing.assert_close(quant.eval()(x)[0], plain.eval()(x)[0])


def _reference_direction(lstm: nn.LSTM, x: Tensor, suffix: str, hidden_amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize-dequantize, then the LSTM equations (PyTorch's documentation), for x (T, N, F) and zero states."""
    w_ih, w_hh, b_ih, b_hh = (
        getattr(lstm, f"{part}_{suffix}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    x_gates = F.linear(reference(x), reference(w_ih, 0, narrow=True), b_ih)
    w_hh, scale = reference(w_hh, 0, narrow=True), hidden_amax / 127
    h = c = torch.zeros(x.shape[1], lstm.hidden_size)
    outputs = {}
    steps = range(len(x))
    for t in reversed(steps) if "reverse" in suffix else steps:
        codes = (h / scale).round().clamp(-128, 127)
        i, f, g, o = (x_gates[t] + F.linear(codes * scale, w_hh, b_hh)).split(lstm.hidden_size, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs[t] = h
    return torch.stack([outputs[t] for t in steps]), h, c


def test_quantized_lstm_equals_reference_bit_for_bit() -> None:
    plain, quant = _twins(num_layers=1, bidirectional=True)
    x = torch.randn(6, 3, 4)
    calibrate(quant, x)
    output, (h_n, c_n) = quant(x)
    parts = [
        _reference_direction(plain, x, suffix, getattr(quant, f"_hidden_{suffix}_quantizer").amax)
        for suffix in ("l0", "l0_reverse")
    ]
    assert_same(output, torch.cat([part[0] for part in parts], -1))
    assert_same(h_n, torch.stack([part[1] for part in parts]))
    assert_same(c_n, torch.stack([part[2] for part in parts]))
    assert not torch.allclose(output, plain(x)[0], rtol=0, atol=1e-6)


def test_each_tensor_has_its_quantizer_and_calibrators_see_it_all() -> None:
    _, quant = _twins(num_layers=2)
    x = torch.randn(6, 3, 4)
    calibrate(quant, x)
    assert {name for name, _ in named_quantizers(quant)} == {
        f"_{kind}_{layer}_quantizer" for kind in ("input", "hidden", "weight_ih", "weight_hh") for layer in ("l0", "l1")
    }
    assert quant._input_l0_quantizer.amax == x.abs().max()
    set_quantizer_state(quant, QuantizerState.CALIBRATING)
    output, _ = quant(x)
    assert quant._hidden_l1_quantizer.amax == output[:-1].abs().max()
    assert torch.equal(quant._weight_hh_l1_quantizer.amax, quant.weight_hh_l1.abs().amax(1))


def test_packed_and_padded_batches_give_the_same_numbers() -> None:
    _, quant = _twins(bidirectional=True)
    sequences = [torch.randn(length, 4) for length in (5, 3, 1)]
    calibrate(quant, sequences[0])
    packed, _ = pad_packed_sequence(quant(pack_sequence(sequences))[0])
    for row, sequence in enumerate(sequences):
        torch.testing.assert_close(packed[: len(sequence), row], quant(sequence)[0], rtol=0, atol=0.01)


def test_wrong_shapes_are_errors() -> None:
    _, quant = _twins()
    with pytest.raises(ValueError, match="4-D"):
        quant(torch.randn(1, 2, 3, 4))
    with pytest.raises(RuntimeError, match="Expected hidden"):
        quant(torch.randn(7, 3, 4), (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)))
    with pytest.raises(RuntimeError, match="2 and 2 dimensions"):
        quant(torch.randn(7, 3, 4), (torch.zeros(1, 5), torch.zeros(1, 5)))


def test_cell_equals_torch_and_reference() -> None:
    plain, quant = nn.LSTMCell(4, 5), qnn.QuantLSTMCell(4, 5)
    quant.load_state_dict(plain.state_dict(), strict=False)
    set_quantizer_state(quant, QuantizerState.CALIBRATING)
    x, hx = torch.randn(3, 4), (torch.randn(3, 5), torch.randn(3, 5))
    torch.testing.assert_close(quant(x, hx), plain(x, hx))
    torch.testing.assert_close(quant(x), plain(x))
    torch.testing.assert_close(quant(x[0], (hx[0][0], hx[1][0])), plain(x[0], (hx[0][0], hx[1][0])))
    quant = qnn.QuantLSTMCell.convert_(plain)
    calibrate(quant, x, hx)
    gates = F.linear(reference(x), reference(plain.weight_ih, 0, narrow=True), plain.bias_ih)
    gates = gates + F.linear(reference(hx[0]), reference(plain.weight_hh, 0, narrow=True), plain.bias_hh)
    i, f, g, o = gates.split(5, 1)
    c = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    assert_same(quant(x, hx), (o.sigmoid() * c.tanh(), c))


def test_checkpoint_of_pytorch_quantization_loads() -> None:
    """It names quantizers by position and has one scale for input and hidden state, amax of weights (4H, 1)."""
    quant = qnn.QuantLSTM(4, 5, bidirectional=True, quant_desc_weight=QuantDescriptor(axis=0, narrow_range=True))
    model = nn.Sequential(quant)
    state = {f"0.{name}": tensor for name, tensor in nn.LSTM(4, 5, bidirectional=True).state_dict().items()}
    for row in range(2):
        state[f"0._input_quantizers.{row}._amax"] = torch.tensor(2.0 + row)
        state[f"0._weight_quantizers.{row}._amax"] = torch.full((20, 1), 0.5 + row)
    assert model.load_state_dict(state)
    assert quant._hidden_l0_reverse_quantizer.amax == 3 and quant._input_l0_quantizer.amax == 2
    assert torch.equal(quant._weight_hh_l0_reverse_quantizer.amax, torch.full((20,), 1.5))
    model(torch.randn(2, 1, 4))
    cell = qnn.QuantLSTMCell(4, 5)
    legacy = {"_input_quantizer._amax": torch.tensor(2.0), "_weight_quantizer._amax": torch.full((20, 1), 0.5)}
    cell.load_state_dict(nn.LSTMCell(4, 5).state_dict() | legacy)
    assert cell._hidden_quantizer.amax == 2 and cell._weight_ih_quantizer.amax.shape == (20,)
