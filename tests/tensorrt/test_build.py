import os
import signal
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qat.errors import EngineError
from qat.tensorrt.build import build_engine
from qat.tensorrt.inspection import inspect_layers
from qat.tensorrt.onnx_graph import OnnxGraph
from qat.tensorrt.options import BuildOptions
from qat.tensorrt.progress import BuildControl


@pytest.mark.parametrize(("kind", "coverage"), [("qdq", 100.0), ("qdq16", 100.0), ("fp16", 0.0), ("fp32", 0.0)])
def test_precision_of_every_profile_is_read_from_the_build_log(kind, coverage, write_toy, options, rtx) -> None:
    path = write_toy(kind)
    result = build_engine(path, options, library=rtx)
    inspection = inspect_layers(result.layers, OnnxGraph.load(path))
    assert result.engine and {layer.profile for layer in result.layers} == {0, 1}
    assert inspection.int8_coverage == coverage
    assert [op.node for op in inspection.operations] == ["stem/Conv", "conv1/Conv", "conv2/Conv", "fc/Gemm"]
    expected = "int8" if coverage else {"fp16": "fp16", "fp32": "fp32"}[kind]
    assert {op.precision for op in inspection.operations} == {expected}
    # Each of the two profiles has a kernel of its own for every operation.
    assert all(len(op.layers) >= 2 for op in inspection.operations)


def test_one_float_layer_is_found_with_its_edge(write_toy, options, rtx) -> None:
    path = write_toy("qdq", float_layers=("mid", "conv2"))
    inspection = inspect_layers(build_engine(path, options, library=rtx).layers, OnnxGraph.load(path))
    (op,) = inspection.float_operations
    assert (op.node, op.edge, op.precision) == ("conv2/Conv", "conv1_relu", "fp32")
    assert "Relu 'conv1/Relu'" in op.cause and inspection.int8_coverage == 75.0


def test_network_without_dynamic_inputs_needs_no_profile(write_toy, rtx) -> None:
    path = write_toy()
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(model, path)
    assert build_engine(path, BuildOptions(compute_capabilities=("8.9",)), library=rtx).engine


def test_missing_profile_is_explained(write_toy, rtx) -> None:
    with pytest.raises(EngineError, match=r"--minShapes.*input:1x3x16x16"):
        build_engine(write_toy(), library=rtx)


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_unreadable_files_are_refused(content, tmp_path, rtx) -> None:
    path = tmp_path / "bad.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineError, match=r"bad\.onnx"):
        build_engine(path, library=rtx)


def test_truncated_file_is_refused(write_toy, options, rtx) -> None:
    path = write_toy()
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(EngineError, match="truncated"):
        build_engine(path, options, library=rtx)


def _model(path: Path, nodes, initializers) -> Path:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 32])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def test_parser_error_names_node_operator_and_advice(tmp_path, rtx) -> None:
    zero = numpy_helper.from_array(np.array(3, np.int8), "zero")
    scale = numpy_helper.from_array(np.array(0.1, np.float32), "scale")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="first/QuantizeLinear"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="first/DequantizeLinear"),
    ]
    path = _model(tmp_path / "asymmetric.onnx", nodes, [zero, scale])
    with pytest.raises(EngineError) as error:
        build_engine(path, library=rtx)
    text = str(error.value)
    assert "first/QuantizeLinear" in text and "(QuantizeLinear)" in text and "symmetric INT8" in text


def test_unknown_operator_is_named(tmp_path, rtx) -> None:
    path = _model(tmp_path / "odd.onnx", [helper.make_node("NoSuchOp", ["x"], ["y"], name="odd/layer")], [])
    with pytest.raises(EngineError, match=r"odd/layer.*NoSuchOp"):
        build_engine(path, library=rtx)


def test_workspace_that_is_too_small_is_explained(write_toy, options, rtx) -> None:
    small = BuildOptions(options.profiles, workspace_bytes=1024, compute_capabilities=("8.9",))
    with pytest.raises(EngineError, match="--memPoolSize"):
        build_engine(write_toy(), small, library=rtx)


class _Interrupting(BuildControl):
    """Presses Ctrl-C when the optimizer starts."""

    def __init__(self) -> None:
        super().__init__(show=False)
        self.phases: list[str] = []

    def start(self, phase: str, steps: int) -> None:
        self.phases.append(phase)
        if len(self.phases) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert self.cancelled.wait(timeout=60)


def test_ctrl_c_stops_the_build(write_toy, options, rtx) -> None:
    control = _Interrupting()
    with pytest.raises(KeyboardInterrupt):
        build_engine(write_toy(), options, library=rtx, control=control)
    assert len(control.phases) < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "tensorrt-build"]
    assert build_engine(write_toy(), options, library=rtx).engine


def test_progress_reports_every_phase(write_toy, options, rtx, capsys) -> None:
    build_engine(write_toy(), options, library=rtx, show_progress=True)
    assert "Building engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware_compatibility": "ampere_plus"}, "compute_capabilities"),
        ({"version_compatible": True}, "compute_capabilities"),
        ({"compute_capabilities": ("9.9",)}, "9.9.*8.9"),
        ({"refit": True}, "CUDA GPU"),
    ],
)
def test_options_that_rtx_does_not_have_are_refused(changes, message, write_toy, options, rtx) -> None:
    with pytest.raises(EngineError, match=message):
        build_engine(write_toy(), BuildOptions(**{"profiles": options.profiles} | changes), library=rtx)


def test_several_targets_weight_streaming_and_levels_build(write_toy, options, rtx) -> None:
    path = write_toy()
    rich = BuildOptions(
        profiles=options.profiles[1:],
        workspace_bytes=2**30,
        optimization_level=1,
        compute_capabilities=("8.6", "8.9"),
        weight_streaming=True,
        tf32=False,
        sparse_weights=True,
        max_aux_streams=0,
    )
    result = build_engine(path, rich, library=rtx)
    assert inspect_layers(result.layers, OnnxGraph.load(path)).int8_coverage == 100.0
