"""What cannot be traced, and forwards that are hard to edit."""

from __future__ import annotations

import copy
import pickle
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import add as sum_of

import placement_networks as net
import qat
from placement_validator import calibrated, quantized_edges
from qat.placement import prepare

X = net.image()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.positive, self.negative = (nn.Conv2d(net.C, net.C, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return (self.positive(y) if x.mean() > 10 else self.negative(y)) + x


def test_data_dependent_control_flow_is_placed_by_module_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = prepare(Branching(), X)
    assert model.first._input_quantizer is model._add_quantizer
    assert hasattr(model.positive, "_weight_quantizer")
    note = qat.summary(model).notes[""]
    assert "decides by values in tensors" in note
    assert note in caplog.text
    assert "untraced" in str(qat.summary(model))
    qat.calibrate(model, [X, X + 100], progress=False)
    assert not torch.equal(model(X + 100), model(X))


class Auxiliary(net.Basic):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(net.C, 32)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, self.auxiliary(y.mean((2, 3)))) if self.training else y


def test_training_only_branch_stays_float_and_alive() -> None:
    model = calibrated(prepare(Auxiliary(), X), (X,))
    assert "evaluation mode" in qat.summary(model).left_float["auxiliary"]
    assert len(model.train()(X)) == 2


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(net.C, net.C, 3)
        self.opaque = torch.jit.script(nn.Sequential(nn.Conv2d(net.C, net.C, 1), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.opaque(self.body(x))


@pytest.mark.filterwarnings("ignore")
def test_compiled_part_is_named() -> None:
    model = prepare(Compiled(), X)
    assert "TorchScript" in qat.summary(model).notes["opaque"]
    assert [n for n, _ in qat.named_quantizers(model)] == ["body._input_quantizer", "body._weight_quantizer"]


def test_model_that_breaks_under_tracing_is_converted_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.overrides import _get_current_function_mode_stack

    class Picky(net.Basic):
        def forward(self, x: Tensor) -> Tensor:
            if _get_current_function_mode_stack():
                raise RuntimeError("no modes please")
            return super().forward(x)

    model = calibrated(prepare(Picky(), X), (X,))
    assert "cannot be traced" in qat.summary(model).notes[""]
    assert not hasattr(model, "_add_quantizer")


def decorated(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Hard(nn.Module):
    """Residual adds in every form that an edit of the source must recognise or refuse."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.conv = form, nn.Conv2d(net.C, net.C, 3, padding=1)
        self.__hidden = 1.0

    @decorated
    def decorated_add(self, y: Tensor, x: Tensor) -> Tensor:
        return y + x

    def forward(self, x: Tensor) -> Tensor:  # noqa: PLR0911
        y = self.conv(x) * self.__hidden
        if self.form == "keyword":
            return torch.add(input=y, other=x)
        if self.form == "method":
            return y.add(x)
        if self.form == "in_place":
            return y.add_(x)
        if self.form == "comprehension":
            return [y + z for z in (x,)][0]  # noqa: RUF015
        if self.form == "nested":
            return torch.relu(torch.relu(y) + (x + 0.0))
        if self.form == "identity_in_place":
            x = x.clone()
            x += y
            return x
        if self.form == "in_place_under_two_names":
            kept = x = x.clone()
            x += y
            return kept
        if self.form == "in_place_through_a_view":
            kept = (x := x.clone())[:1]
            x += y
            return torch.relu(kept)
        if self.form == "item_in_place":
            parts = [x.clone()]
            parts[0] += y
            return parts[0]
        if self.form == "alias":
            return sum_of(y, x)
        if self.form == "starred":
            return torch.add(*(y, x))
        if self.form == "sum":
            return sum([y, x])
        return self.decorated_add(y, x)  # fmt: skip


@pytest.mark.parametrize("form", ["keyword", "method", "in_place", "identity_in_place", "comprehension", "nested"])
def test_edited_forms(form: str) -> None:
    model = Hard(form).eval()
    expected = model(X)
    edges = quantized_edges(calibrated(prepare(model, X), (X,)), (X,))
    assert "add" in [user for users in edges.values() for user in users]
    qat.set_quantizer_state(model, qat.QuantizerState.PASSTHROUGH)
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("item_in_place", "changes that tensor in place"),
        ("in_place_under_two_names", "read under another name"),
        ("in_place_through_a_view", "read under another name"),
        ("alias", "does not call 'add' by that name"),
        ("starred", "as a starred list"),
        ("sum", "by that name"),
        ("decorated", "whose source is not at hand"),
    ],
)
def test_refused_forms_stay_float_with_the_reason(form: str, reason: str) -> None:
    model = Hard(form).eval()
    expected = model(X)
    calibrated(prepare(model, X), (X,))
    assert any(reason in text for text in qat.summary(model).left_float.values())
    qat.set_quantizer_state(model, qat.QuantizerState.PASSTHROUGH)
    assert torch.equal(model(X), expected)


class Looped(nn.Module):
    """One expression on several tensors: one quantizer for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(net.C, net.C, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(torch.relu(x)) + x
        return x


def test_expression_in_a_loop_has_one_quantizer() -> None:
    model = calibrated(prepare(Looped(), X), (X,))
    edges = quantized_edges(model, (X,))
    assert edges["_add_quantizer"] == ["add"] * 3
    assert len([row for row in qat.summary(model).quantizers if "_add" in row.name]) == 1


def test_pickle_refuses_another_source() -> None:
    from qat.errors import ConfigError
    from qat.placement.rewriting import _new_edited

    model = prepare(net.Downsample(), X)
    new, (base, edits, _), _ = model.__reduce_ex__(2)
    assert new is _new_edited
    with pytest.raises(ConfigError, match="the source of Downsample has changed"):
        _new_edited(base, edits, "other")


class InPlace(nn.Module):
    """What is added is computed from the identity, which must reach it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(net.C, net.C, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x += self.conv(torch.relu(x))
        return x


def test_identity_changed_in_place_is_quantized_for_the_add_alone() -> None:
    model = calibrated(prepare(InPlace(), X), (X,))
    assert quantized_edges(model, (X,)) == {"conv._input_quantizer": ["conv2d"], "_add_quantizer": ["add"]}
    model.train()(X).sum().backward()
    assert model.conv.weight.grad is not None


class Fused(nn.Module):
    """HRNet's fusion: one expression adds now to a layer's output, now to an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [nn.Conv2d(net.C, net.C, 3, padding=1), nn.Identity(), nn.Conv2d(net.C, net.C, 1)]
        )

    def forward(self, x: Tensor) -> Tensor:
        y = None
        for branch in self.branches:
            y = branch(x) if y is None else y + branch(x)
        return torch.relu(y)


def test_runs_of_one_expression_have_their_own_identity(tmp_path: Path) -> None:
    model = Fused().eval()
    expected = model(X)
    calibrated(prepare(model, X), (X,))
    edges = quantized_edges(model, (X,))
    assert edges == {"branches.0._input_quantizer": ["add", "conv2d", "conv2d"], "_add_quantizers_2.1": ["add"]}
    readers = {row.name: row.readers for row in qat.summary(model).quantizers}
    assert "add (run 0)" in readers["branches.0._input_quantizer"]
    quantized = model(X)
    assert torch.equal(copy.deepcopy(model)(X), quantized)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), quantized)
    assert torch.equal(torch.compile(model, backend="eager")(X), quantized)
    assert qat.export(model, X, tmp_path / "model.onnx").parity.passed
    model.branches.append(nn.Identity())  # a run that the example inputs did not show passes through
    model(X)
    model.branches.pop(3)
    model.train()(X).sum().backward()
    qat.set_quantizer_state(model.eval(), qat.QuantizerState.PASSTHROUGH)
    assert torch.equal(model(X), expected)


class Accumulating(Looped):
    """The first time around, the expression adds to a number, which no quantizer takes."""

    def forward(self, x: Tensor) -> Any:
        total: Any = 0
        for conv in self.convs:
            total += conv(x)
        return total


def test_expression_that_is_not_always_on_tensors_is_quantized_where_it_is() -> None:
    model = calibrated(prepare(Accumulating(), X), (X,))
    names = {row.name for row in qat.summary(model).quantizers}
    assert {name for name in names if "add" in name} == {"_add_quantizers.1", "_add_quantizers.2"}
