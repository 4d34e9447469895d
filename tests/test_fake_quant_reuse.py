"""Readers of one tensor share its quantized result, and nobody sees the difference."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.checkpoint import checkpoint

import qat
from qat.quantizer import QuantizerState, TensorQuantizer, named_quantizers
from qat.training import apply_amax_mode


class Branches(nn.Module):
    """One tensor, the network's input or a hidden one, that a convolution and the residual add read."""

    def __init__(self, stem: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 16, 1) if stem else nn.Identity()
        self.body, self.last, self.head = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.stem(x))

    def tail(self, x: Tensor) -> Tensor:
        return self.head(self.last(x + self.body(x).relu()).relu())


def branches(stem: bool = False) -> Branches:
    torch.manual_seed(0)
    model = qat.prepare(Branches(stem).eval(), torch.randn(2, 16, 6, 6))
    qat.calibrate(model, [torch.randn(2, 16, 6, 6)], progress=False)
    return model


def test_values_that_change_in_unwatched_memory_are_seen() -> None:
    array = np.zeros((2, 16, 6, 6), np.float32)
    buffer, frames = torch.from_numpy(array), np.random.default_rng(0).standard_normal((3, *array.shape), np.float32)

    def batches() -> Iterator[Tensor]:
        for n, frame in enumerate(frames):
            array[...] = frame * (n + 1)
            yield buffer

    model = branches()
    qat.calibrate(model, batches(), progress=False)
    assert model.body._input_quantizer.amax == torch.tensor(np.abs(frames[2]).max() * 3)
    with torch.no_grad():
        for frame in frames:
            array[...] = frame
            assert torch.equal(model(buffer), copy.deepcopy(model)(torch.from_numpy(frame)))


@pytest.mark.parametrize("stem", [False, True])
def test_each_forward_pass_has_a_graph_of_its_own(stem: bool) -> None:
    model, x = branches(stem), torch.randn(2, 16, 6, 6, requires_grad=True)
    for _ in range(3):
        model(x).sum().backward()
        first, second = model(x), model(x)
        first.sum().backward()
        second.square().sum().backward()


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    x, found = torch.randn(2, 16, 6, 6), []
    for checkpointed in (False, True):
        model = branches(stem=True).train()
        for _ in range(3):
            hidden = model.stem(x)
            model.body._input_quantizer(hidden)  # a reader outside
            y = checkpoint(model.tail, hidden, use_reentrant=False) if checkpointed else model.tail(hidden)
            y.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_does_not_move_amax_twice(reentrant: bool) -> None:
    x, found = torch.randn(8, 6, requires_grad=True), []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
        qat.quantize_(model)
        qat.calibrate(model, [torch.randn(8, 6)], progress=False)
        apply_amax_mode(model.train(), "reestimated")
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.square().sum().backward()
        found.append([*(p.grad for p in model.parameters()), *(q._amax for _, q in named_quantizers(model))])
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


def test_inference_mode_before_and_after_training() -> None:
    model, x = branches(), torch.randn(2, 16, 6, 6)
    want = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), want) and torch.equal(model(x.clone()), want)
        qat.calibrate(model, [x], progress=False)
    model.train()(x).sum().backward()
    assert model.body.weight.grad is not None and model.body.weight.grad.any()


def test_a_gradient_penalty_reaches_the_weights_and_tangents_are_refused() -> None:
    quantizer, weight = TensorQuantizer(qat.QuantDescriptor(amax=1.0)), torch.tensor(3.0, requires_grad=True)
    x = torch.tensor([0.5, 4.0], requires_grad=True)
    (gradient,) = torch.autograd.grad((quantizer(x) * weight).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert weight.grad == 6  # the second value is clamped
    with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
        quantizer(forward_ad.make_dual(torch.ones(2), torch.ones(2)))


def test_a_checkpoint_keeps_why_a_tensor_stays_float() -> None:
    model, x = branches(), torch.randn(2, 16, 6, 6)
    model.head._input_quantizer.set_state(QuantizerState.PASSTHROUGH, "it costs accuracy")
    model.load_state_dict(model.state_dict())
    qat.calibrate(model, [x], progress=False)
    kept = model.head._input_quantizer
    assert (kept.state, kept.reason) == (QuantizerState.PASSTHROUGH, "it costs accuracy")


def test_distributed_checkpoints_and_models_on_the_meta_device() -> None:
    model = branches()
    found = get_model_state_dict(model)
    assert found.keys() == model.state_dict().keys()
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 4))
    full = nn.Sequential(nn.Linear(3, 4))
    for either in (empty, full):
        qat.quantize_(either)
    qat.calibrate(full, [torch.randn(2, 3)], progress=False)
    empty.load_state_dict(full.state_dict(), assign=True)
    x = torch.randn(2, 3)
    assert torch.equal(empty(x), full(x))
