"""Mutated ONNX files through the linter, its repair, and the readers: findings, or an error of ours."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.errors import QatError
from qat.onnx import fix, lint
from qat.tensorrt import BuildOptions, OnnxGraph, build_engine, load_library


class Source(nn.Module):
    """A residual block, a pool and a head: Q/DQ on activations and INT8 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))) + x)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    torch.manual_seed(0)
    model, x = Source().eval(), torch.randn(2, 16, 6, 6)
    qat.prepare(model, x, keep_float_logits=False)
    qat.calibrate(model, [x], progress=False)
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    qat.export(model, (x,), path)
    return onnx.load(path)


def _read(data: bytes, path: Path) -> None:
    """Every reader: what it says, or an error of ours."""
    path.write_bytes(data)
    for reader in (lint, lambda p: fix(p, p.with_name("fixed.onnx")), OnnxGraph.load):
        try:
            reader(path)
        except QatError as error:
            assert str(error)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_mutated_bytes(first: int, exported: onnx.ModelProto, tmp_path: Path) -> None:
    original = exported.SerializeToString()
    for seed in range(first, first + 25):
        rng, data = random.Random(seed), bytearray(original)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        _read(bytes(data), tmp_path / "m.onnx")


def mutate(model: onnx.ModelProto, rng: random.Random) -> None:
    """One change that keeps a protobuf a protobuf."""
    graph = model.graph
    node = rng.choice(graph.node)
    tensor = rng.choice(graph.initializer)
    names = [name for n in graph.node for name in (*n.input, *n.output)] + ["", "nowhere"]
    kind = rng.randrange(12)
    if kind == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif kind == 1 and node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice(names)
    elif kind == 2:
        node.op_type = rng.choice(
            ("Conv", "QuantizeLinear", "DequantizeLinear", "Gemm", "MatMul", "Add", "If", "Nonsense")
        )
    elif kind == 3:
        del node.input[rng.randrange(len(node.input) + 1) :]
    elif kind == 4:
        del node.output[:]
    elif kind == 5:
        tensor.data_type = rng.choice((0, 1, 2, 3, 7, 10, 16, 17, 99))
    elif kind == 6:
        del tensor.dims[:]
        tensor.dims.extend(rng.choice(((), (0,), (-1,), (3, 5), (2**40,))))
    elif kind == 7:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    elif kind == 8:
        graph.node.remove(node)
    elif kind == 9:
        node.attribute.add(
            name=rng.choice(("axis", "group", "strides")), type=rng.choice((1, 2, 7)), i=rng.randint(-9, 9)
        )
    elif kind == 10:
        model.opset_import[0].version = rng.choice((0, 1, 9, 13, 25, 99, 2**40))
    else:
        graph.node.append(copy.deepcopy(node))


def mutated(model: onnx.ModelProto, seed: int) -> bytes:
    """A copy with one to three changes, serialized."""
    rng, changed = random.Random(seed), copy.deepcopy(model)
    for _ in range(rng.randint(1, 3)):
        if changed.graph.node and changed.graph.initializer:
            mutate(changed, rng)
    return changed.SerializeToString()


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_mutated_graphs(first: int, exported: onnx.ModelProto, tmp_path: Path) -> None:
    for seed in range(first, first + 40):
        try:
            _read(mutated(exported, seed), tmp_path / "m.onnx")
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_mutated_graphs_are_built_or_refused(exported: onnx.ModelProto, tmp_path: Path) -> None:
    """The builder is C++: what it cannot take must be stopped in front of it, or this process dies."""
    pytest.importorskip("tensorrt_rtx", reason="needs the extra tensorrt-rtx")
    library, built = load_library("tensorrt_rtx"), 0
    exported = copy.deepcopy(exported)
    exported.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    for seed in range(60):
        (tmp_path / "m.onnx").write_bytes(mutated(exported, seed))
        try:
            build_engine(tmp_path / "m.onnx", BuildOptions(compute_capabilities=("8.9",)), library=library)
            built += 1
        except QatError as error:
            assert str(error), f"seed {seed}"
    assert 0 < built < 60
