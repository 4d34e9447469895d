import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qat.descriptor import MIN_SCALE, QuantDescriptor
from qat.errors import CalibrationError, NotCalibratedError
from qat.fake_quant_reuse import LastResult
from qat.quantizer import AmaxMode, QuantizerState, TensorQuantizer, name_quantizers, named_quantizers


class Net(nn.Module):
    def __init__(self, axis: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.input_quantizer = TensorQuantizer(QuantDescriptor(axis=axis))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.input_quantizer(x))
        return y


def calibrated(quantizer: TensorQuantizer, *batches: Tensor) -> TensorQuantizer:
    quantizer.set_state(QuantizerState.CALIBRATING)
    for batch in batches:
        assert torch.equal(quantizer(batch), batch)
    quantizer.load_calib_amax()
    quantizer.set_state(QuantizerState.QUANTIZING)
    return quantizer


def test_uncalibrated_quantizer_names_its_layer() -> None:
    net = Net()
    name_quantizers(net)
    with pytest.raises(NotCalibratedError, match="'input_quantizer' is not calibrated"):
        net(torch.ones(2, 4))


def test_states() -> None:
    x = torch.randn(8, 4)
    quantizer = calibrated(TensorQuantizer(), x, 2 * x)
    assert quantizer.amax == 2 * x.abs().max()
    assert not torch.equal(quantizer(x), x)
    quantizer.set_state(QuantizerState.PASSTHROUGH)
    assert quantizer(x) is x


def test_fixed_amax_is_left_alone_by_calibration() -> None:
    quantizer = calibrated(TensorQuantizer(QuantDescriptor(amax=3.0)), torch.ones(2) * 50)
    assert quantizer.amax == 3.0


@pytest.mark.parametrize("source_calibrated", [False, True])
@pytest.mark.parametrize("target_calibrated", [False, True])
@pytest.mark.parametrize("axis", [None, 1])
def test_state_dict_before_and_after_calibration(
    source_calibrated: bool, target_calibrated: bool, axis: int | None
) -> None:
    source, target = Net(axis), Net(axis)
    if source_calibrated:
        calibrated(source.input_quantizer, torch.randn(8, 4))
    if target_calibrated:
        calibrated(target.input_quantizer, torch.randn(8, 4))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    if source_calibrated:
        assert torch.equal(target.input_quantizer.scale, source.input_quantizer.scale)  # type: ignore[arg-type]
        x = torch.randn(2, 4)
        assert torch.equal(source(x), target(x))
    assert "input_quantizer._amax" in source.state_dict()


def test_state_is_kept_in_the_state_dict() -> None:
    source, target = Net(), Net()
    source.input_quantizer.set_state(QuantizerState.PASSTHROUGH)
    target.load_state_dict(source.state_dict())
    assert target.input_quantizer.state is QuantizerState.PASSTHROUGH


def test_foreign_checkpoint_shapes_load() -> None:
    net = Net(axis=1)
    values = dict(net.state_dict())
    del values["input_quantizer._state"]
    values["input_quantizer._amax"] = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    net.input_quantizer.set_state(QuantizerState.PASSTHROUGH)
    net.load_state_dict(values)
    assert net.input_quantizer.state is QuantizerState.QUANTIZING
    assert net.input_quantizer.amax is not None
    assert net.input_quantizer.amax.tolist() == [1, 2, 3, 4]
    with pytest.raises(CalibrationError, match=r"input_quantizer._amax.*4 values"):
        Net().load_state_dict(values)
    values["input_quantizer._amax"] = torch.tensor([[1.0, 2.0, -3.0, 4.0]])
    with pytest.raises(CalibrationError, match=r"input_quantizer.*negative"):
        Net(axis=1).load_state_dict(values)


def test_float_checkpoint_loads_before_calibration_only() -> None:
    net = Net()
    state = {"linear.weight": net.linear.weight, "linear.bias": net.linear.bias}
    net.load_state_dict(state)
    assert not net.input_quantizer.calibrated
    calibrated(net.input_quantizer, torch.ones(4))
    with pytest.raises(RuntimeError, match=r"input_quantizer\._amax"):
        net.load_state_dict(state)


def test_half_keeps_amax_in_float32() -> None:
    net = Net()
    calibrated(net.input_quantizer, torch.full((4,), 1.0009765))
    before = net.input_quantizer.amax.clone()  # type: ignore[union-attr]
    net.half().to(torch.bfloat16)
    assert net.input_quantizer.amax.dtype == torch.float32  # type: ignore[union-attr]
    assert torch.equal(net.input_quantizer.amax, before)  # type: ignore[arg-type]
    assert net.linear.weight.dtype == torch.bfloat16


@pytest.mark.gpu
def test_checkpoint_moves_to_the_modules_device() -> None:
    source = Net()
    calibrated(source.input_quantizer, torch.randn(8, 4))
    target = Net().cuda()
    target.load_state_dict(source.state_dict())
    assert target.input_quantizer.amax.is_cuda  # type: ignore[union-attr]
    target(torch.randn(2, 4, device="cuda"))


@pytest.mark.parametrize("mode", list(AmaxMode))
def test_deepcopy_and_pickle(mode: AmaxMode) -> None:
    net = Net()
    calibrated(net.input_quantizer, torch.randn(8, 4))
    net.input_quantizer.set_amax_mode(mode)
    net.eval()
    x = torch.randn(3, 4)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), net(x))
        twin.input_quantizer.amax = 100.0
        assert net.input_quantizer.amax != 100.0


def test_dead_tensor_gets_the_smallest_scale_and_is_listed() -> None:
    quantizer = calibrated(TensorQuantizer(), torch.zeros(8))
    assert quantizer.dead == [0]
    assert quantizer.scale is not None
    assert quantizer.scale.item() == MIN_SCALE
    channels = calibrated(TensorQuantizer(QuantDescriptor(axis=0)), torch.tensor([[1.0], [0.0], [2.0]]))
    assert channels.dead == [1]


def test_never_seen_keeps_its_amax_and_says_so() -> None:
    quantizer = calibrated(TensorQuantizer(), torch.ones(3))
    quantizer.calibrator.reset()  # type: ignore[union-attr]
    assert not quantizer.load_calib_amax()
    assert quantizer.amax == 1.0


def test_learned_amax_trains_and_keeps_the_scale_positive() -> None:
    net = Net()
    calibrated(net.input_quantizer, torch.randn(64, 4))
    net.input_quantizer.set_amax_mode("learned")
    assert "input_quantizer._amax" in dict(net.named_parameters())
    before = net.input_quantizer.amax.item()  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        net(torch.randn(64, 4)).square().sum().backward()
        optimizer.step()
        assert net.input_quantizer.scale.item() > 0  # type: ignore[union-attr]
    assert net.input_quantizer.amax.item() != before  # type: ignore[union-attr]
    net.input_quantizer.set_amax_mode("frozen")
    assert "input_quantizer._amax" in dict(net.named_buffers())


def test_reestimation_follows_the_data_in_training_only() -> None:
    quantizer = calibrated(TensorQuantizer(), torch.ones(4))
    quantizer.set_amax_mode("reestimated")
    quantizer.eval()
    quantizer(torch.full((4,), 3.0))
    assert quantizer.amax == 1.0
    quantizer.train()
    quantizer(torch.full((4,), 3.0))
    assert quantizer.amax == pytest.approx(1.02)
    weight = calibrated(TensorQuantizer(QuantDescriptor(axis=0)), torch.ones(2, 3))
    weight.set_amax_mode("reestimated")
    weight(torch.tensor([[5.0, 1, 1], [0.5, 0.2, 0]]))
    assert weight.amax.tolist() == [5.0, 0.5]  # type: ignore[union-attr]


def test_named_quantizers_lists_shared_ones_once() -> None:
    net = nn.ModuleDict({"a": Net(), "b": Net()})
    net["b"].input_quantizer = net["a"].input_quantizer
    assert [name for name, _ in named_quantizers(net)] == ["a.input_quantizer"]


def test_repr_shows_state_and_amax() -> None:
    quantizer = TensorQuantizer()
    assert "not calibrated" in repr(quantizer)
    assert "amax=2" in repr(calibrated(quantizer, torch.tensor([2.0])))


def test_one_result_for_all_readers_of_a_tensor_while_nothing_changed() -> None:
    quantizer = calibrated(TensorQuantizer(), torch.randn(50))
    x = torch.randn(5, 4, requires_grad=True) * 1.0
    assert quantizer(x) is not quantizer(x)  # it is not known to have several readers
    quantizer.last_result = LastResult(readers=3)
    first = quantizer(x)
    assert quantizer(x) is first
    (first.square() + quantizer(x)).sum().backward()
    assert quantizer(x) is not first  # all three had it
    with torch.no_grad():
        assert quantizer(x) is not first
    assert quantizer(x.clone()) is not first
    quantizer.amax = 0.5
    changed = quantizer(x)
    assert changed.abs().max() <= 0.5 * 128 / 127
    changed += 1
    assert quantizer(x) is not changed
    before = quantizer(x)
    with torch.no_grad():
        x.mul_(0)
    assert not before.eq(0).all() and quantizer(x).eq(0).all()
    twin = copy.deepcopy(quantizer)
    assert pickle.loads(pickle.dumps(quantizer))(x).eq(0).all() and twin(x).eq(0).all()


def test_readers_under_autocast_share_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer casts the result and lets it go: it must be held for the others, and let go after the last."""
    calls: list[int] = []
    monkeypatch.setattr(TensorQuantizer, "_fake_quantize", lambda q, x, amax: (calls.append(1), x * 2)[1])
    quantizer = calibrated(TensorQuantizer(), torch.randn(50))
    quantizer.last_result = LastResult(readers=3)
    layers = [nn.Linear(8, 8) for _ in range(3)]

    def step() -> tuple[int, Tensor]:
        calls.clear()
        x = torch.randn(4, 8, requires_grad=True) + 1
        with torch.autocast("cpu", torch.bfloat16):
            total = sum(layer(quantizer(x)).float().sum() for layer in layers)
        total.backward()
        return len(calls), x

    assert [step()[0] for _ in range(3)] == [1, 1, 1]
    assert quantizer.last_result._entry is None
    layers.append(nn.Linear(8, 8))
    assert step()[0] == 2


def test_reestimation_leaves_infinite_and_empty_batches_out() -> None:
    quantizer = calibrated(TensorQuantizer(), torch.tensor([2.0]))
    quantizer.set_amax_mode("reestimated")
    quantizer.train()
    for bad in (torch.tensor([math.inf, 1.0]), torch.tensor([math.nan]), torch.zeros(0, 3)):
        assert quantizer(bad).shape == bad.shape and quantizer.amax == 2
    quantizer(torch.tensor([1.0]))
    assert quantizer.amax == pytest.approx(1.99)


def test_a_quantizer_that_never_ran_compiles_without_a_graph_break() -> None:
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module.print_readable(print_output=False))
        return module

    quantizer = TensorQuantizer()
    quantizer.amax = 1.0
    x = torch.randn(4, 5)
    assert torch.equal(torch.compile(quantizer, backend=backend, fullgraph=True)(x), quantizer(x))
    assert len(graphs) == 1
    assert "qat.fake_quantize" not in graphs[0], "Inductor cannot fuse the operator with its neighbours"


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_quantizer_is_one_operator(strict: bool) -> None:
    quantizer = TensorQuantizer()
    quantizer.amax = 1.0
    program = torch.export.export(quantizer, (torch.randn(4, 5),), strict=strict)
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["qat.fake_quantize.default"]
