"""The placement benchmark's counting: on layers made by hand, and on a residual block that tensorrt-rtx builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onnx import helper

import qat
from qat.tensorrt import BuildOptions, Layer, OnnxGraph, build_engine, inspect_layers, load_library
from qat.tensorrt.layers import LayerTensor
from rtx_counts import count, residual_adds, traffic
from rtx_report import plot, table

INT8, FP32 = LayerTensor("i", "int8", (2, 32)), LayerTensor("f", "fp32", (2, 32))
SHARED = ("q1", "d1")
OWN = ("q2", "d2")


def graph() -> OnnxGraph:
    """Conv(DQ(Q(x))) + DQ(Q(x)) + DQ(Q(other)), then Relu and Q."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["a"], name="q1"),
        helper.make_node("DequantizeLinear", ["a", "s"], ["b"], name="d1"),
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"], name="dw"),
        helper.make_node("Conv", ["b", "wd"], ["c"], name="conv"),
        helper.make_node("Add", ["b", "c"], ["e"], name="add1"),
        helper.make_node("QuantizeLinear", ["other", "s"], ["f"], name="q2"),
        helper.make_node("DequantizeLinear", ["f", "s"], ["g"], name="d2"),
        helper.make_node("Cast", ["g"], ["h"], name="cast", to=1),
        helper.make_node("Add", ["e", "h"], ["i"], name="add2"),
        helper.make_node("Relu", ["i"], ["j"], name="relu"),
        helper.make_node("QuantizeLinear", ["j", "s"], ["k"], name="q3"),
    ]
    return OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [])))


def kernel(nodes: tuple[str, ...], reads: list[LayerTensor], kind: str = "kgen", name: str = "__myl_Add") -> Layer:
    return Layer(name, kind, tuple(reads), (LayerTensor("w", "int8", (32, 32)),), (FP32,), nodes)


def counted(*layers: Layer) -> dict:
    return count(graph(), inspect_layers(layers, graph()))


def test_quantizers_of_an_add_are_its_own_and_those_of_the_sum() -> None:
    assert residual_adds(graph()) == {"add1": set(), "add2": {"q2", "d2", "q3"}}


def test_layers_in_int8_are_told_from_those_that_lost_it() -> None:
    conv, lost = kernel(("conv",), [INT8], "correlation", "conv"), kernel(("conv",), [FP32], "correlation", "conv")
    good, bad = counted(conv), counted(lost)
    assert (good["quantized"], good["int8"], good["float"], good["lost"]) == (1, 1, 0, [])
    assert bad["int8"] == 0 and "conv (Conv" in bad["lost"][0]


@pytest.mark.parametrize(("nodes", "requantized"), [(SHARED, 0), (OWN, 1), (("q3",), 1)])
def test_a_kernel_that_only_quantizes_counts_against_the_add_it_serves(nodes, requantized) -> None:
    found = counted(kernel(nodes, [INT8], name="__myl_CastMulMinMaxRounCast_myl0_1"))
    assert (found["standalone_qdq"], found["requantized_adds"]) == (1, requantized)


def test_an_add_reads_int8_beside_what_its_own_kernel_multiplies() -> None:
    fused = kernel(("conv", "add1"), [INT8, FP32], "correlation", "conv")
    assert counted(fused)["adds_int8"] == 0
    assert counted(kernel(("conv", "add1"), [INT8, INT8], "correlation", "conv"))["adds_int8"] == 1
    found = counted(kernel(("add1",), [INT8, FP32]))
    assert found["adds_int8"] == 1 and found["adds_read"] == {"fp32+int8": 1}
    for_a_concat = LayerTensor("i", "int8", (2, 16))
    assert counted(kernel(("add1",), [for_a_concat, FP32, FP32]))["adds_int8"] == 0


def test_traffic_is_of_activations() -> None:
    assert traffic(kernel((), [INT8])) == 2 * 32 * (1 + 4)


def test_placement_decides_the_type_of_the_identity(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds an engine; install qat[tensorrt-rtx]")

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv, self.last = (torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.stem(x))
            return self.last(torch.relu(x + self.conv(x)))

    def built(placed: torch.nn.Module) -> dict:
        path, x = tmp_path / "model.onnx", torch.randn(2, 32, 16, 16)
        qat.calibrate(placed, [x], progress=False)
        qat.export(placed, x, path, precision="fp16", dynamic_batch=False, verify=False)
        options = BuildOptions(compute_capabilities=("8.9",))
        layers = build_engine(path, options, library=load_library("tensorrt_rtx")).layers
        return count(OnnxGraph.load(path), inspect_layers(layers, OnnxGraph.load(path)))

    traced, modules = built(qat.prepare(Block(), torch.randn(2, 32, 16, 16))), Block()
    qat.quantize_(modules)
    by_module = built(modules)
    assert (traced["int8"], traced["lost"], traced["adds_int8"], traced["requantized_adds"]) == (3, [], 1, 0)
    assert (by_module["adds"], by_module["adds_int8"]) == (1, 0)
    assert traced["traffic_mib"] <= by_module["traffic_mib"]


def test_table_and_picture_show_what_was_not_built(tmp_path: Path) -> None:
    rows = {
        "net/traced/fp16": counted(kernel(("conv",), [INT8], "correlation", "conv")),
        "net/modelopt/fp16": {"refused": "Concat: types differ"},
    }
    text = table(rows)
    assert "net/modelopt/fp16: refused: Concat: types differ" in text
    plot(tmp_path / "p.png", rows)
    assert (tmp_path / "p.png").stat().st_size > 5000
