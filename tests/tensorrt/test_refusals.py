"""What a user reads when TensorRT refuses a file: the node, TensorRT's words, and what the linter finds there."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import GraphWriter
from lint_cases import BAD, MORE_BAD
from onnx import TensorProto

from qat.errors import EngineError
from qat.tensorrt.build import build_engine
from qat.tensorrt.lint_advice import LinterAdvice, refuse_lethal
from qat.tensorrt.options import BuildOptions


def _refusal(model, tmp_path: Path, rtx) -> str:
    path = tmp_path / "refused.onnx"
    onnx.save(model, path)
    with pytest.raises(EngineError) as error:
        build_engine(path, BuildOptions(compute_capabilities=("8.9",)), library=rtx)
    return str(error.value)


PARSED = [
    ("qoperator", BAD["qoperator"], "(MatMulInteger)", "Export in Q/DQ format"),
    ("zero-point-nonzero", BAD["zero-point-nonzero"], "(QuantizeLinear)", "its zero-point is 3"),
    ("zero-point-nonzero", MORE_BAD[0][1], "(QuantizeLinear)", "lint.py"),
    ("code-type", MORE_BAD[1][1], "q.zero", "its codes are INT16"),
    ("scale-value", BAD["scale-value"], "(QuantizeLinear)", "was never calibrated: calibrate 'q' again"),
    ("scale-value", MORE_BAD[2][1], "(QuantizeLinear)", "scale nan"),
    ("bias-quantized", BAD["bias-quantized"], "(DequantizeLinear)", "Store the bias as float"),
]


@pytest.mark.parametrize(("rule", "case", "theirs", "ours"), PARSED, ids=[f"{i}-{p[0]}" for i, p in enumerate(PARSED)])
def test_parser_errors_carry_what_the_linter_finds_there(rule, case, theirs, ours, tmp_path, rtx) -> None:
    model, node = case()
    text = _refusal(model, tmp_path, rtx)
    assert f"'{node}'" in text and theirs in text
    assert f"[{rule}]" in text and ours in text
    assert "cudaError" not in text


def _two_nodes(second: str) -> onnx.ModelProto:
    """A quantizer with a zero-point of 3, read by a node of an operator that nobody knows."""
    w = GraphWriter()
    pair = [w.constant("s", np.float32(0.02)), w.constant("z", np.int8(3))]
    codes = w.add("QuantizeLinear", ["x", *pair], "first")
    w.nodes.append(onnx.helper.make_node(second, [codes, *pair], ["y"], name="second", domain="odd"))
    graph = onnx.helper.make_graph(
        w.nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        w.initializers,
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("odd", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_neighbours_count_where_the_node_itself_is_clean(tmp_path) -> None:
    path = tmp_path / "neighbours.onnx"
    onnx.save(_two_nodes("Odd"), path)
    (sentence,) = LinterAdvice(path).about("second", "unknown operator")
    assert sentence.startswith("[zero-point-nonzero] 'first': its zero-point is 3")
    assert LinterAdvice(path).about("", "Failed to import initializer: z")[0].startswith("[zero-point-nonzero] 'first'")
    assert LinterAdvice(path).about("elsewhere", "z") == []


def test_a_file_that_the_linter_cannot_read_still_gets_the_parsers_error(tmp_path, rtx) -> None:
    model, _ = BAD["qoperator"]()
    model.graph.node[0].input[1] = "nowhere"
    assert "cannot parse" in _refusal(model, tmp_path, rtx)
    assert LinterAdvice(tmp_path / "none.onnx").about("y", "") == []


def test_failed_builds_carry_it_as_well(tmp_path, rtx) -> None:
    w = GraphWriter()
    zero = w.add("Cast", [w.add("ReduceMax", ["x"], "most", keepdims=0)], "zero", to=TensorProto.INT8)
    pair = [w.constant("s", np.float32(0.02)), zero]
    w.add("DequantizeLinear", [w.add("QuantizeLinear", ["x", *pair], "q"), *pair], "y")
    text = _refusal(w.model("y"), tmp_path, rtx)
    assert "cannot build" in text and "[scale-computed] 'q'" in text


def _dynamic(op_type: str, weight_too: bool = False) -> onnx.ModelProto:
    """Dynamic quantization in front of a layer with a quantized weight."""
    w = GraphWriter()
    amax = w.add("ReduceMax", [w.add("Abs", ["x"], "abs")], "amax", keepdims=0)
    pair = [w.add("Div", [amax, w.constant("steps", np.float32(127))], "scale"), w.constant("zero", np.int8(0))]
    x = w.add("DequantizeLinear", [w.add("QuantizeLinear", ["x", *pair], "q"), *pair], "dq")
    x = w.qdq("x", "static") if weight_too else x
    if op_type == "Conv":
        codes = w.constant("codes", np.ones((32, 32, 3, 3), np.int8))
        weight = w.add("DequantizeLinear", [codes, *pair], "weight_dq") if weight_too else ""
        w.conv(x, "y", weight=weight)
        return w.model("y")
    w.add("MatMul", [x, w.weight("w", (32, 32), 1)], "y")
    return w.model("y", {"x": (8, 32)})


@pytest.mark.parametrize(("weight_too", "quantizer"), [(False, "dq"), (True, "weight_dq")])
def test_what_would_crash_the_process_never_reaches_tensorrt(weight_too, quantizer, tmp_path, rtx) -> None:
    text = _refusal(_dynamic("Conv", weight_too), tmp_path, rtx)
    assert f"'{quantizer}', read by Conv 'y'" in text and "Quantize statically" in text


def test_only_what_crashes_is_kept_away(tmp_path, rtx) -> None:
    path = tmp_path / "dynamic.onnx"
    onnx.save(_dynamic("MatMul"), path)
    refuse_lethal(path, onnx.load(path))
    assert build_engine(path, BuildOptions(compute_capabilities=("8.9",)), library=rtx).engine
