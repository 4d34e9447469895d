"""Concatenations: which branches an engine quantizes once more, by hand and as tensorrt-rtx builds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import qat
from qat.tensorrt import BuildOptions, Layer, Library, OnnxGraph, build_engine, concatenations

X = torch.randn(2, 16, 32, 32, generator=torch.Generator().manual_seed(0))


class Skip(nn.Module):
    """A convolution that reads a tensor, and a concatenation of the two for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Conv2d(n, 32, 3, padding=1) for n in (16, 32, 64))

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.first(x))
        joined = torch.cat([torch.relu(self.middle(skip)), skip], dim=1)
        return torch.relu(self.last(joined)).mean((2, 3))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Skip().eval()
    qat.prepare(model, X)
    qat.calibrate(model, [X], progress=False)
    path = tmp_path_factory.mktemp("concats") / "m.onnx"
    qat.export(model, (X,), path, dynamic_batch=False)
    return path


def rounds(path: Path, library: Library) -> list[tuple[int, int | None, int | None]]:
    layers = build_engine(path, BuildOptions(compute_capabilities=("8.9",)), library=library).layers
    return [(c.already_int8, c.rounds, c.requantized) for c in concatenations(layers, OnnxGraph.load(path))]


def test_one_scale_needs_no_requantization(file: Path, rtx: Library) -> None:
    assert rounds(file, rtx) == [(1, 1, 0)]


def test_two_scales_do(file: Path, rtx: Library, tmp_path: Path) -> None:
    """The same file with another scale behind the concatenation: the skip has to be rounded a second time."""
    model = onnx.load(file)
    (concat,) = (node for node in model.graph.node if node.op_type == "Concat")
    (quantize,) = (node for node in model.graph.node if concat.output[0] in node.input)
    (dequantize,) = (node for node in model.graph.node if quantize.output[0] in node.input)
    values = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    larger = (1.4 * values[quantize.input[1]]).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(larger, "larger"))
    quantize.input[1] = dequantize.input[1] = "larger"
    onnx.save(model, tmp_path / "m.onnx")
    assert rounds(tmp_path / "m.onnx", rtx) == [(1, 2, 1)]


def graph() -> OnnxGraph:
    nodes = [
        helper.make_node("QuantizeLinear", ["skip", "s"], ["a"], name="q1"),
        helper.make_node("Concat", ["up", "skip"], ["b"], name="join", axis=1),
        helper.make_node("QuantizeLinear", ["b", "s"], ["c"], name="q2"),
        helper.make_node("Concat", ["height", "width"], ["shape"], name="shape", axis=0),
    ]
    return OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [])))


@pytest.mark.parametrize(
    ("names", "requantized"),
    [
        (["__myl_ReluMulRounCastConc_myl0_1"], 0),
        (["__myl_ReluMulRounCastMulRounCastConc_myl0_1"], 1),
        (["__myl_ReluMulRounCast_myl0_1", "__myl_MulRounCast_myl0_2"], 1),
        (["__myl_Move_myl0_1"], 0),
        (["__myl_ReluMulRounCastMulEtc_myl0_1"], None),
        (["conv + relu"], None),
    ],
)
def test_roundings_are_counted_in_the_kernels_of_the_join(names: list[str], requantized: int | None) -> None:
    layers = [Layer(name, "kgen", onnx_nodes=("join", "q2")) for name in names]
    elsewhere = Layer(
        "__myl_MulRounRounRounCast_myl0_9" if requantized is not None else "x", "kgen", onnx_nodes=("q1",)
    )
    (found,) = concatenations([*layers, elsewhere], graph())
    assert (found.node, found.branches, found.already_int8, found.requantized) == ("join", 2, 1, requantized)


def test_the_worst_profile_counts() -> None:
    layers = [
        Layer("__myl_MulRounCastConc_myl0_1", "kgen", onnx_nodes=("join", "q2")),
        Layer("__myl_MulRounMulRounCastConc_myl1_1", "kgen", onnx_nodes=("join", "q2"), profile=1),
    ]
    assert [each.rounds for each in concatenations(layers, graph())] == [2]
