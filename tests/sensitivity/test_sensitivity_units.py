"""Units, blocks and what they weigh."""

from typing import Any

import pytest
import torch
import torchvision
from sensitivity_networks import Chain, calibrated_chain, float_layers
from torch import Tensor, nn

import qat
from qat.quantizer import named_quantizers
from qat.selectors import exact
from qat.sensitivity import (
    Evaluations,
    Unit,
    find_blocks,
    find_units,
    operation_shares,
    propose,
    rank_sensitivity,
)
from qat.sensitivity.coverage import Point, mark_front


def small_resnet(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).eval()
    x = torch.randn(2, 3, 32, 32)
    qat.prepare(model, x, **options)
    qat.calibrate(model, [x], progress=False)
    return model


def test_layers_that_share_a_quantizer_are_one_unit() -> None:
    model = small_resnet()
    units = {unit.name: unit for unit in find_units(model)}
    assert units["layer1.1.conv1"].members == ("layer1.1.conv1", "layer1.1.add")
    assert units["layer2.0.conv1"].members == ("layer2.0.conv1", "layer2.0.downsample.0")
    names = [name for unit in units.values() for name in unit.quantizers]
    assert sorted(names) == sorted(name for name, _ in named_quantizers(model)), "each quantizer is in one unit"
    blocks = find_blocks(model, list(units.values()))
    assert list(blocks) == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]


@pytest.mark.parametrize("name", ["layer1.1.conv1", "layer2.0.conv1", "layer4.0.conv2"])
def test_excluding_a_unit_leaves_what_switching_it_does(name: str) -> None:
    model = small_resnet()
    unit = next(unit for unit in find_units(model) if unit.name == name)
    again = small_resnet(exclude=[exact(member) for member in unit.members])
    kept = {name for name, _ in named_quantizers(model)} - set(unit.quantizers)
    assert {name for name, _ in named_quantizers(again)} == kept


class Attention(nn.Module):
    """Attention written out, as Swin has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1), v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.self_attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.out(self.attention(x))
        return y + self.self_attention(y, y, y, need_weights=False)[0]


def test_attention_is_one_unit_and_blocks_are_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(32) for _ in range(2)]).eval()
    x = torch.randn(2, 16, 32)
    qat.prepare(model, x, keep_float_logits=False)
    qat.calibrate(model, [x], progress=False)
    units = find_units(model)
    members = [set(unit.members) for unit in units]
    assert {"0.attention.matmul", "0.attention.matmul_2"} in members
    whole = next(unit for unit in units if unit.name == "0.self_attention")
    assert any("_attention._softmax" in name for name in whole.quantizers)
    assert set(find_blocks(model, units)) == {"0", "1"}
    shares = {unit.name: share for unit, share in operation_shares(model, units, x).items()}
    # Multiply-accumulates a block and sample: qkv and self-attention's projections, out, and twice L*L*E for each.
    tokens, width = 16, 32
    product = tokens * tokens * width
    linear = tokens * width * width
    total = 2 * (3 * linear + linear + 2 * product + 4 * linear + 2 * product)
    assert shares["0.attention.qkv"] == pytest.approx(100 * 3 * linear / total)
    assert shares["0.attention.matmul"] == pytest.approx(100 * 2 * product / total)
    assert shares["0.self_attention"] == pytest.approx(100 * (4 * linear + 2 * product) / total)
    assert sum(shares.values()) == pytest.approx(100)


def test_units_and_shares_of_a_model_converted_by_modules() -> None:
    model = calibrated_chain()
    units = find_units(model)
    assert [unit.members for unit in units] == [(name,) for name, _ in Chain().named_children()]
    assert all(len(unit.quantizers) == 2 for unit in units)
    shares = operation_shares(model, units, torch.randn(4, 16))
    assert list(shares.values()) == pytest.approx([20.0] * 5)


def test_the_pareto_front() -> None:
    a, b = Unit(("a",), ()), Unit(("b",), ())
    points = [Point((), 90, 70.0), Point((a,), 80, 69.0), Point((b,), 80, 75.0), Point((a, b), 60, 75.0)]
    marked = mark_front(points)
    assert [(p.coverage, p.value, p.best) for p in marked] == [
        (90, 70.0, True), (80, 75.0, True), (80, 69.0, False), (60, 75.0, False)
    ]  # fmt: skip
    assert [p.best for p in mark_front(points, lower_is_better=True)] == [True, True, False, False]


def test_blocks_are_switched_whole_and_their_layers_taken_back() -> None:
    model = small_resnet()
    needed = {"layer2.0.conv2", "layer4.1.conv1"}

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"score": float(len(needed & float_layers(model)))}

    evaluations = Evaluations(model, evaluate)
    ranking = rank_sensitivity(evaluations, "score", level="block", progress=False)
    assert [(row.name, row.score) for row in ranking.rows[:3]] == [("layer2.0", 1), ("layer4.1", 1), ("layer1.0", 0)]
    assert "layer2.0.downsample.0" in ranking.rows[0].members
    proposal = propose(evaluations, ranking, "score", target=2.0, progress=False)
    assert proposal.members == ("layer2.0.conv2", "layer4.1.conv1", "layer4.1.add")
