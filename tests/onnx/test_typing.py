from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import MAP, GraphWriter, attention, random_input, residual
from lint_cases import silu
from onnx import TensorProto, helper, numpy_helper
from onnx_models import Recurrent, Residual, Tokens, Upsample, calibrated, inputs_for

from qat.errors import EngineError, ExportError
from qat.onnx import export
from qat.onnx.typing import to_fp16
from qat.runtime import OnnxRuntimeRunner
from qat.tensorrt import BuildOptions, OnnxGraph, build_engine, inspect_layers, load_library

GRAPHS = {
    "residual": residual,
    "residual opset 13": lambda: residual(opset=13),
    "attention": attention,
    "float attention": lambda: attention(""),
    "silu": silu,
}


def run(model: onnx.ModelProto, inputs: dict[str, Any]) -> np.ndarray:
    return next(iter(OnnxRuntimeRunner(model.SerializeToString()).run(inputs).values()))


def error(value: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2 error."""
    return float(np.linalg.norm(value.astype(np.float64) - wanted) / np.linalg.norm(wanted))


def types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = [*inferred.value_info, *inferred.input, *inferred.output]
    return {value.name: value.type.tensor_type.elem_type for value in values}


def scales(model: onnx.ModelProto) -> dict[str, bytes]:
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    used = {node.input[1] for node in model.graph.node if node.op_type in {"QuantizeLinear", "DequantizeLinear"}}
    assert all(stored[name].data_type == TensorProto.FLOAT for name in used)
    return {name: numpy_helper.to_array(stored[name]).tobytes() for name in used}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("keep", [True, False])
def test_half_file_is_valid_and_equals_the_float_one(name: str, keep: bool, tmp_path: Path) -> None:
    model = GRAPHS[name]()
    before = model.SerializeToString()
    report = to_fp16(model, tmp_path / "half.onnx", keep_io_types=keep)
    assert model.SerializeToString() == before and onnx.load(tmp_path / "half.onnx") == report.model
    x = random_input(model)
    half_x = x if keep else {key: value.astype(np.float16) for key, value in x.items()}
    result = run(report.model, half_x)
    assert result.dtype == (np.float32 if keep else np.float16)
    assert error(result, run(model, x)) < 0.02
    assert scales(report.model) == scales(model)
    assert [value.name for value in report.model.graph.output] == [value.name for value in model.graph.output]
    kinds = types(report.model)
    for node in report.model.graph.node:
        if node.op_type in {"Conv", "MatMul", "Gemm", "Relu", "Add", "Mul"}:
            assert kinds[node.output[0]] == TensorProto.FLOAT16, node.name
    floats = {t.name for t in report.model.graph.initializer if t.data_type == TensorProto.FLOAT}
    assert {name.rpartition(".")[2] for name in floats} <= {"scale", "gamma", "beta", "mean", "variance"}


@pytest.mark.parametrize("model_class", [Residual, Tokens, Upsample, Recurrent])
@pytest.mark.parametrize("int8_weights", [True, False])
def test_our_own_exports(model_class: Any, int8_weights: bool, tmp_path: Path) -> None:
    model = calibrated(model_class())
    example = inputs_for(model)
    x = {"x": example.numpy()}
    path = export(model, example, tmp_path / "m.onnx", int8_weights=int8_weights, verify=False).path
    half = to_fp16(path)
    proto = onnx.load(path)
    assert scales(half.model) == scales(proto)
    assert error(run(half.model, x), run(proto, x)) < 0.03
    assert half.model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert half.half_nodes and half.model.metadata_props == proto.metadata_props


def test_typing_twice_changes_nothing() -> None:
    for make in GRAPHS.values():
        once = to_fp16(make(), keep_io_types=False)
        twice = to_fp16(once.model, keep_io_types=False)
        assert twice.casts == 0 and not twice.half_nodes
        assert [n.name for n in twice.model.graph.node] == [n.name for n in once.model.graph.node]


def test_some_inputs_and_outputs_stay_float32() -> None:
    w = GraphWriter()
    w.add("Add", ["a", "b"], "sum")
    model = w.model("sum", {"a": (2, 3), "b": (2, 3)})
    report = to_fp16(model, keep_io_types=["b"])
    kinds = types(report.model)
    assert (kinds["a"], kinds["b"], kinds["sum"]) == (TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.FLOAT16)
    with pytest.raises(ExportError, match="names c; the file has"):
        to_fp16(model, keep_io_types=["c"])


@pytest.mark.parametrize("pool", ["MaxPool", "AveragePool"])
def test_pooling_between_quantizers_gets_no_casts(pool: str) -> None:
    w = GraphWriter()
    x = w.add(pool, [w.qdq("x", "q")], "pool", kernel_shape=[2, 2], strides=[2, 2])
    x = w.add("Transpose", [x], "moved", perm=[0, 1, 3, 2])
    w.conv(w.qdq(x, "q2"), "y")
    report = to_fp16(w.model("y"), keep_io_types=False)
    makers = {output: node.op_type for node in report.model.graph.node for output in node.output}
    inputs = {node.name: makers.get(node.input[0]) for node in report.model.graph.node}
    assert inputs["pool"] == "DequantizeLinear" and inputs["q2/QuantizeLinear"] == "Transpose"
    assert set(report.kept) == {"pool", "moved"} and report.casts == 3


def test_a_mask_beyond_the_range_gives_no_nan() -> None:
    model = attention("", mask=-3.4e38)
    report = to_fp16(model)
    assert {"masked", "softmax"} <= set(report.kept) and "3.4e+38" in report.kept["masked"]
    x = random_input(model)
    result = run(report.model, x)
    assert np.isfinite(result).all() and error(result, run(model, x)) < 0.02


def test_a_layer_norm_of_single_operators_keeps_its_range() -> None:
    """As exporters before opset 17 write it; its variance of 1e7 and its epsilon of 1e-12 do not fit FP16."""
    w = GraphWriter(13)
    mean = w.add("ReduceMean", ["x"], "mean", axes=[-1])
    centred = w.add("Sub", ["x", mean], "centred")
    square = w.add("Pow", [centred, w.constant("two", np.float32(2))], "square")
    variance = w.add("ReduceMean", [square], "variance", axes=[-1])
    root = w.add("Sqrt", [w.add("Add", [variance, w.constant("eps", np.float32(1e-12))], "stable")], "root")
    w.linear(w.qdq(w.add("Div", [centred, root], "norm"), "q"), "y")
    model = w.model("y", {"x": (4, 32)})
    x = {"x": random_input(model)["x"] * 5000}
    report = to_fp16(model)
    assert {"mean", "centred", "square", "variance", "stable", "root", "norm"} <= set(report.kept)
    assert error(run(report.model, x), run(model, x)) < 0.01


@pytest.mark.parametrize("opset", [13, 21])
def test_global_pooling_is_half_and_the_mean_of_a_variance_is_not(opset: int) -> None:
    def mean(w: GraphWriter, x: str, name: str) -> str:
        axes = np.array([2, 3])
        if opset < 18:
            return w.add("ReduceMean", [x], name, axes=axes)
        return w.add("ReduceMean", [x, w.constant(f"{name}.axes", axes)], name)

    w = GraphWriter(opset)
    x = w.add("Relu", [w.conv(w.qdq("x", "q"), "conv")], "relu")
    gate = w.add("Sigmoid", [mean(w, x, "squeeze")], "gate")
    square = w.add("Mul", [x, gate], "excited")
    w.add("Div", [square, mean(w, w.add("Pow", [x, w.constant("two", np.float32(2))], "pow"), "variance")], "y")
    report = to_fp16(w.model("y"))
    assert {"squeeze", "gate", "excited"} <= set(report.half_nodes)
    assert {"pow", "variance", "y"} == set(report.kept)


def test_large_integers_stay_exact() -> None:
    w = GraphWriter()
    real = w.add("Cast", ["x"], "real", to=TensorProto.FLOAT)
    w.add("Sub", [real, w.constant("base", np.float32(100000))], "y")
    model = w.model("y", {"x": (4,)})
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    x = {"x": np.array([100001, 100002, 7, 2049])}
    np.testing.assert_array_equal(run(to_fp16(model).model, x), run(model, x))


def test_a_scale_made_by_operators_is_not_rounded() -> None:
    w = GraphWriter()
    scale = w.add("Mul", [w.constant("amax", np.float32(2.5)), w.constant("step", np.float32(1 / 127))], "scale")
    pair = [scale, w.constant("zero", np.int8(0))]
    w.add("DequantizeLinear", [w.add("QuantizeLinear", ["x", *pair], "codes"), *pair], "y")
    model = w.model("y")
    report = to_fp16(model)
    assert report.kept["scale"] == "makes a scale" and report.casts == 0
    np.testing.assert_array_equal(run(report.model, random_input(model)), run(model, random_input(model)))


def test_control_flow_and_unknown_operators_keep_their_types() -> None:
    branches = []
    for sign in (1.0, -1.0):
        constant = numpy_helper.from_array(np.float32(sign), "sign")
        value = helper.make_tensor_value_info(f"out{sign}", TensorProto.FLOAT, None)
        node = helper.make_node("Mul", ["relu", "sign"], [f"out{sign}"], name=f"mul{sign}")
        branches.append(helper.make_graph([node], "branch", [], [value], [constant]))
    w = GraphWriter()
    relu = w.add("Relu", [w.conv("x", "conv")], "relu")
    kept = w.add("If", [w.constant("condition", True)], "if", then_branch=branches[0], else_branch=branches[1])
    w.add("Add", [kept, w.add("BiasGelu", [relu, w.normal("b", 8)], "custom", domain="com.microsoft")], "y")
    model = w.model("if")
    report = to_fp16(model)
    assert "control flow" in report.kept["if"] and "com.microsoft::BiasGelu" in report.kept["custom"]
    assert "relu" in report.half_nodes
    model = w.model("y")
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, MAP))
    report = to_fp16(model)
    assert "unknown type" in report.kept["y"]
    assert error(run(report.model, random_input(model)), run(model, random_input(model))) < 0.01


def test_bfloat16_raises_the_opset_and_computes_in_bfloat16() -> None:
    """ONNX Runtime's CPU provider has no bfloat16 convolution, so ONNX's reference implementation runs it."""
    from onnx.reference import ReferenceEvaluator

    w = GraphWriter(17)
    x = w.add("Relu", [w.conv(w.qdq("x", "q"), "conv", (8, 8))], "relu")
    w.conv(w.qdq(x, "q2"), "y", (8, 8))
    model = w.model("y", {"x": (1, 8, 6, 6)})
    report = to_fp16(model, dtype="bfloat16")
    assert next(entry.version for entry in report.model.opset_import if not entry.domain) == 22
    assert types(report.model)["relu"] == TensorProto.BFLOAT16
    (result,) = ReferenceEvaluator(report.model).run(None, random_input(model))
    assert error(result, run(model, random_input(model))) < 0.05
    with pytest.raises(ValueError, match="float8"):
        to_fp16(model, dtype="float8")


def test_nothing_is_written_where_the_file_is_bad(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="there is no"):
        to_fp16(tmp_path / "none.onnx", tmp_path / "out.onnx")
    model = residual()
    model.graph.node[0].op_type = "Conv"
    with pytest.raises(ExportError, match=r"onnx\.checker"):
        to_fp16(model, tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


def _built(model: onnx.ModelProto, path: Path) -> Any:
    onnx.save(model, path)
    options = BuildOptions(compute_capabilities=("8.9",))
    result = build_engine(path, options, library=load_library("tensorrt_rtx"))
    return inspect_layers(result.layers, OnnxGraph.load(path)), result.layers


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("residual", "float16"), ("residual opset 13", "float16"), ("attention", "float16"), ("residual", "bfloat16")],
)
def test_tensorrt_keeps_the_int8_kernels_and_adds_none(name: str, dtype: str, tmp_path: Path) -> None:
    try:
        load_library("tensorrt_rtx")
    except EngineError as reason:
        pytest.skip(f"needs tensorrt_rtx: {reason}")
    model = GRAPHS[name]()
    before, layers_before = _built(model, tmp_path / "float.onnx")
    half, layers = _built(to_fp16(model, dtype=dtype, keep_io_types=False).model, tmp_path / "half.onnx")
    assert before.int8_coverage == half.int8_coverage == 100.0
    assert len(layers) <= len(layers_before)
    kind = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    assert kind in {tensor.dtype for layer in layers for tensor in (*layer.inputs, *layer.outputs)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_average_pooling_between_quantizers_stays_int8_in_tensorrt(dtype: str, tmp_path: Path) -> None:
    try:
        load_library("tensorrt_rtx")
    except EngineError as reason:
        pytest.skip(f"needs tensorrt_rtx: {reason}")
    w = GraphWriter()
    x = w.conv(w.qdq("x", "q"), "first")
    # tensorrt-rtx has an INT8 kernel for an average that includes the padding only, which is torch's default.
    pool = {"kernel_shape": [2, 2], "strides": [2, 2], "count_include_pad": 1}
    x = w.add("AveragePool", [w.qdq(x, "q2")], "pool", **pool)
    w.conv(w.qdq(x, "q3"), "second")
    half, layers = _built(to_fp16(w.model("second", {"x": MAP}), dtype=dtype).model, tmp_path / "half.onnx")
    assert [layer.precision for layer in layers if "pool" in layer.kind] == ["int8"]
    assert not [layer.name for layer in half.standalone_qdq if "q3/QuantizeLinear" in layer.onnx_nodes]


def test_float_layers_of_a_map_become_half_in_tensorrt(tmp_path: Path) -> None:
    try:
        load_library("tensorrt_rtx")
    except EngineError as reason:
        pytest.skip(f"needs tensorrt_rtx: {reason}")
    w = GraphWriter()
    x = w.conv(w.qdq("x", "q"), "first")
    w.conv(x, "second", weight=w.normal("float", 32, 32, 3, 3))
    half, _ = _built(to_fp16(w.model("second", {"x": MAP})).model, tmp_path / "half.onnx")
    assert {op.node: op.precision for op in half.operations} == {"first": "int8", "second": "fp16"}
