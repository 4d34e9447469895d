import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qat.errors import EngineError
from qat.tensorrt.build import build_engine
from qat.tensorrt.inspection import inspect_layers, is_reformat, is_standalone_qdq, speed_warning
from qat.tensorrt.layers import Layer, LayerTensor
from qat.tensorrt.onnx_graph import OnnxGraph, node_name, torch_module
from qat.tensorrt.options import BuildOptions
from qat.tensorrt.page import render_page, write_page

INT8 = LayerTensor("x", "int8", (1, 32))
FP32 = LayerTensor("y", "fp32", (1, 32))


def _layer(name: str, inputs=(FP32,), outputs=(FP32,), kind: str = "kgen", nodes=()) -> Layer:
    return Layer(name, kind, tuple(inputs), (), tuple(outputs), tuple(nodes))


@pytest.mark.parametrize(
    ("layer", "reformat", "standalone"),
    [
        (_layer("__myl_Move_myl0_0"), True, False),
        (_layer("__myl_Tran_myl0_0", nodes=["block/Transpose"]), False, False),
        (_layer("Reformatting CopyNode", kind="Reformat"), True, False),
        (_layer("__myl_MulMinMaxRounCast_myl0_0", outputs=[INT8]), False, True),
        (_layer("__myl_CastMul_myl0_0", inputs=[INT8]), False, True),
        (_layer("__myl_CastMul_myl0_0"), False, False),
        (_layer("__myl_MulAddReluMulMinMaxRounCast_myl0_0", outputs=[INT8]), False, False),
        (_layer("block/QuantizeLinear", kind="Scale", nodes=["block/QuantizeLinear"]), False, True),
        (_layer("x", kind="quantize"), False, True),
        (_layer("signal", kind="signal"), False, False),
    ],
)
def test_conversions_are_told_from_work(layer, reformat, standalone) -> None:
    assert is_reformat(layer) == reformat
    assert is_standalone_qdq(layer) == standalone


def test_a_gate_that_quantizes_its_product_is_no_standalone_kernel() -> None:
    """Squeeze-and-excitation: the kernel's first product is the model's, and the file tells."""
    nodes = [
        helper.make_node("Mul", ["x", "gate"], ["y"], name="block/Mul"),
        helper.make_node("QuantizeLinear", ["y", "s"], ["q"], name="block/QuantizeLinear"),
    ]
    graph = OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    name = "__myl_MulCastMulMinMaxRounCast_myl0_7"
    gate = _layer(name, [FP32, FP32], [INT8], nodes=["block/Mul", "block/QuantizeLinear"])
    assert not is_standalone_qdq(gate, graph)
    assert is_standalone_qdq(_layer(name, [FP32], [INT8], nodes=["block/QuantizeLinear"]), graph)


def test_a_leaky_relu_that_quantizes_its_result_is_no_standalone_kernel() -> None:
    """Its kernel multiplies and takes a maximum, as a quantizer's does; a plain ReLU has a step of its own name."""
    nodes = [
        helper.make_node("LeakyRelu", ["x"], ["y"], name="block/LeakyRelu"),
        helper.make_node("QuantizeLinear", ["y", "s"], ["q"], name="block/QuantizeLinear"),
    ]
    graph = OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    kernel = _layer("__myl_MulMaxCastMulMinMaxRounCast_myl0_5", [FP32], [INT8], nodes=[n.name for n in nodes])
    assert not is_standalone_qdq(kernel, graph)


@pytest.fixture
def inspected(write_toy, options, rtx):
    path = write_toy("qdq", float_layers=("block", "conv1"))
    return inspect_layers(build_engine(path, options, library=rtx).layers, OnnxGraph.load(path))


def test_min_int8_fails_and_names_layers(inspected) -> None:
    inspected.require_int8(75.0)
    with pytest.raises(EngineError, match=r"75\.0 %.*(?s:.)*conv1/Conv \(Conv, module conv1\) is fp32"):
        inspected.require_int8(90)


def test_summary_names_the_cause(inspected) -> None:
    (missing,) = inspected.summary()["not_int8"]
    assert missing["module"] == "conv1" and missing["edge"] == "stem_relu"
    assert inspected.summary()["standalone_qdq"], "the network input needs a quantize kernel of its own"


def test_an_operation_that_is_float_in_one_profile_only_counts_as_float(inspected) -> None:
    graph_names = [op.node for op in inspected.int8_operations]
    layers = [
        dataclasses.replace(x, inputs=(FP32,), constants=()) if x.profile == 1 and "conv2/Conv" in x.onnx_nodes else x
        for x in inspected.layers
    ]
    assert "conv2/Conv" in graph_names
    nodes = [helper.make_node("Conv", ["a", "b"], ["c"], name="conv2/Conv")]
    graph = OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    assert inspect_layers(layers, graph).int8_coverage == 0.0


def test_a_node_that_no_layer_names_counts_against_coverage() -> None:
    nodes = [helper.make_node("Conv", ["a", "b"], ["c"], name="lost")]
    graph = OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    inspection = inspect_layers([_layer("other")], graph)
    assert inspection.int8_coverage == 0.0 and inspection.operations[0].precision == "not found"


@pytest.mark.parametrize(("second", "expected"), [("int8", "int8"), ("fp32", "fp32")])
def test_a_node_whose_name_was_dropped_takes_the_worst_of_the_unnamed_layers(second, expected) -> None:
    nodes = [helper.make_node("Conv", ["a", "b"], ["c"], name=f"lost{i}") for i in range(2)]
    graph = OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    layers = [
        _layer("gemm_0", [INT8], kind="gemm"),
        _layer("gemm_1", [INT8 if second == "int8" else FP32], kind="gemm"),
    ]
    assert [op.precision for op in inspect_layers(layers, graph).operations] == [expected] * 2


def test_without_the_onnx_file_weighted_layers_are_the_operations(inspected) -> None:
    plain = inspect_layers(inspected.layers)
    assert {op.precision for op in plain.operations} == {"int8", "fp32"}
    with pytest.raises(EngineError, match="no layers"):
        inspect_layers([])


def test_page_shows_every_layer_coloured(inspected, tmp_path) -> None:
    page = render_page(inspected, "<toy>")
    assert page.count("<rect") == len(inspected.layers)
    assert "&lt;toy&gt;" in page and "#7bc67b" in page and "#f0a35e" in page and "stem_relu" in page
    assert "Profile 1" in page and page.count("<path") > len(inspected.layers) // 2
    write_page(inspected, "toy", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def _graph(
    op: str, weight: tuple[int, ...], scales: int, axis: int, activation_scales: int = 1, **attributes
) -> OnnxGraph:
    def scale(count: int, name: str) -> onnx.TensorProto:
        values = np.full(count, 0.1, np.float32) if count > 1 else np.array(0.1, np.float32)
        return numpy_helper.from_array(values, name)

    initializers = [
        numpy_helper.from_array(np.ones(weight, np.int8), "w"),
        scale(scales, "ws"),
        scale(activation_scales, "xs"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs"], ["xq"], name="q", output_dtype=TensorProto.INT8, axis=1),
        helper.make_node("DequantizeLinear", ["xq", "xs"], ["xd"], name="d", axis=1),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"], name="wd", axis=axis),
        helper.make_node("Cast", ["wd"], ["wc"], name="cast", to=TensorProto.FLOAT16),
        helper.make_node(op, ["xd", "wc"], ["y"], name="op", **attributes),
    ]
    return OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [], initializers)))


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (_graph("Conv", (32, 64, 3, 3), 64, axis=1), "axis 1; Conv needs axis 0"),
        (_graph("ConvTranspose", (32, 64, 3, 3), 64, axis=1), "ConvTranspose has one scale a channel"),
        (_graph("MatMul", (64, 32), 64, axis=0), "axis 0; MatMul needs axis 1"),
        (_graph("MatMul", (64, 32), 32, axis=-1), "still chose a float kernel"),
        (_graph("Gemm", (64, 32), 64, axis=0), "axis 0; Gemm needs axis 1"),
        (_graph("Gemm", (64, 32), 64, axis=0, transB=1), "still chose a float kernel"),
        (_graph("Conv", (32, 64, 3, 3), 32, axis=0, activation_scales=64), "one scale a tensor"),
        (_graph("Conv", (32, 8, 3, 3), 32, axis=0, group=4), "grouped convolution"),
        (_graph("Conv", (8, 64, 3, 3), 8, axis=0), "small"),
    ],
)
def test_float_causes(graph, reason) -> None:
    cause = graph.float_cause(graph.by_name["op"])
    assert reason in cause.reason and cause.edge


def test_which_nodes_carry_qdq_and_which_tensors_are_constant() -> None:
    """Also through shapes, of the activation alone, and in a chain deeper than Python's recursion."""
    chain = [helper.make_node("Relu", [f"r{n}"], [f"r{n + 1}"]) for n in range(2000)]
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
        helper.make_node("Transpose", ["d"], ["t"]),
        helper.make_node("MatMul", ["t", "r2000"], ["y"], name="carries"),
        helper.make_node("MatMul", ["y", "w"], ["z"], name="float"),
        helper.make_node("Neg", ["w"], ["n"]),
    ]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = OnnxGraph(helper.make_model(helper.make_graph([*chain, *nodes], "g", [], [], [weight])))
    assert [node.name for node in graph.weighted_nodes if graph.carries_qdq(node)] == ["carries"]
    assert [name for name in ("w", "n", "z", "r2000", "q") if graph.is_constant(name)] == ["w", "n"]
    assert graph.producer("n").op_type == "Neg" and graph.producer("w") is None


def test_float_weight_is_the_cause() -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["xq", "s"], ["xd"]),
        helper.make_node("Conv", ["xd", "w"], ["y"], name="op"),
    ]
    weight = numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "w")
    graph = OnnxGraph(helper.make_model(helper.make_graph(nodes, "g", [], [], [weight])))
    cause = graph.float_cause(graph.by_name["op"])
    assert cause.edge == "w" and cause.reason.startswith("weight 'w', from an initializer")
    assert node_name(nodes[0]) == "node_of_xd"


def test_module_names_from_dynamo_and_older_exports() -> None:
    node = helper.make_node("Conv", ["a", "b"], ["c"], name="node_Conv_7")
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'features', 'features.0', 'conv2d']")
    assert torch_module(node) == "features.0"
    assert torch_module(helper.make_node("Conv", ["a", "b"], ["c"], name="/layer1/0/conv1/Conv")) == "layer1.0.conv1"


def test_speed_warning_names_layers_only_where_int8_is_slower(inspected) -> None:
    assert speed_warning(1.0, 2.0, inspected) == ""
    assert "conv1/Conv" in speed_warning(2.0, 1.0, inspected)


def test_build_options_reach_every_target(write_toy, rtx, options) -> None:
    """Without a target the engine holds one per capability; the listing must still count every operation once."""
    path = write_toy()
    result = build_engine(path, BuildOptions(options.profiles), library=rtx)
    inspection = inspect_layers(result.layers, OnnxGraph.load(path))
    assert inspection.int8_coverage == 100.0 and len(inspection.operations) == 4
