from collections.abc import Mapping

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from qat.errors import RunnerError
from qat.runtime import OnnxRuntimeRunner, Runner, TensorSpec, TorchRunner, check_inputs, fixed_batch, run_in_batches
from qat.runtime.runner import Array, Arrays
from qat.runtime.torch import measure_torch


def _scale_model(batch: int | str = "n") -> bytes:
    """y = dequantize(quantize(x)) * 2, with scale 0.5."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Mul", ["d", "two"], ["y"]),
    ]
    constants = {"s": np.float32(0.5), "z": np.int8(0), "two": np.float32(2)}
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])
    graph = helper.make_graph(nodes, "g", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


X = np.array([[0.2, 0.3, -80.0], [0.75, 1.25, 5.0]], np.float32)


@pytest.mark.parametrize("reference", [True, False])
def test_onnx_runtime_from_bytes_and_from_a_file(reference, tmp_path) -> None:
    (tmp_path / "m.onnx").write_bytes(_scale_model())
    expected = np.clip(np.rint(X / 0.5), -128, 127) * 0.5 * 2
    for source in (_scale_model(), tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
        runner: Runner = OnnxRuntimeRunner(source, reference=reference)
        assert (runner.input_names, runner.output_names) == (["x"], ["y"])
        np.testing.assert_array_equal(runner.run({"x": X})["y"], expected)


def _int8_conv() -> bytes:
    """A convolution whose products saturate 16-bit accumulators."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"]),
        helper.make_node("Conv", ["d", "wd"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "t", "z"], ["cq"]),
        helper.make_node("DequantizeLinear", ["cq", "t", "z"], ["y"]),
    ]
    initializers = [
        numpy_helper.from_array(np.full((4, 64, 1, 1), 127, np.int8), "w"),
        numpy_helper.from_array(np.array(1.0, np.float32), "s"),
        numpy_helper.from_array(np.array(64 * 127.0, np.float32), "t"),
        numpy_helper.from_array(np.array(0, np.int8), "z"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64, 2, 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 2, 2])
    graph = helper.make_graph(nodes, "g", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


@pytest.mark.parametrize("reference", [True, False])
def test_neither_mode_saturates(reference) -> None:
    x = np.full((1, 64, 2, 2), 127, np.float32)
    np.testing.assert_array_equal(OnnxRuntimeRunner(_int8_conv(), reference).run({"x": x})["y"], 64 * 127.0 * 127)


@pytest.mark.parametrize("reference", [True, False])
def test_zeros_in_front_of_a_max_pool_stay_zeros(reference) -> None:
    """ONNX Runtime 1.30 fuses the two, and a MaxPool pads with minus infinity; found by fuzzing (seed 1581)."""
    nodes = [
        helper.make_node("Pad", ["x", "pads", "zero"], ["p"]),
        helper.make_node("MaxPool", ["p"], ["y"], kernel_shape=[2, 2]),
    ]
    constants = {"pads": np.array([0, 0, 0, 1, 0, 0, 1, 0]), "zero": np.float32(0)}
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 2, 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    result = OnnxRuntimeRunner(model.SerializeToString(), reference).run({"x": np.full((1, 1, 2, 2), -3, np.float32)})
    np.testing.assert_array_equal(result["y"], [[[[0, -3], [0, 0]]]])


def test_a_broken_file_is_refused(tmp_path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no")
    with pytest.raises(RunnerError, match=r"bad\.onnx"):
        OnnxRuntimeRunner(tmp_path / "bad.onnx")
    with pytest.raises(RunnerError, match="given as bytes"):
        OnnxRuntimeRunner(b"no")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "missing"),
        ({"x": X, "y": X}, "unknown"),
        ({"x": X.astype(np.float64)}, "float64"),
        ({"x": X[:, :2]}, "shape"),
        ({"x": X[0]}, "shape"),
    ],
)
def test_wrong_inputs_are_explained(inputs, message) -> None:
    with pytest.raises(RunnerError, match=message):
        OnnxRuntimeRunner(_scale_model()).run(inputs)


def test_torch_and_onnx_runtime_agree_behind_one_interface(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    runner = TorchRunner(model, ["x"], ["y"])
    assert not model.training and runner.input_names == ["x"]
    np.testing.assert_allclose(runner.run({"x": X})["y"], model(torch.from_numpy(X)).detach().numpy())
    with pytest.raises(RunnerError, match="takes the inputs"):
        runner.run({"input": X})


class _Pair(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": a + b, "difference": a - b}


def test_torch_with_several_inputs_and_outputs() -> None:
    runner = TorchRunner(_Pair(), ["a", "b"], ["s", "d"])
    result = runner.run({"b": X, "a": 2 * X})
    np.testing.assert_array_equal(result["d"], X)
    with pytest.raises(RunnerError, match="returned 2 tensors"):
        TorchRunner(_Pair(), ["a", "b"], ["s"]).run({"a": X, "b": X})


def test_on_a_cpu_torch_has_nothing_to_copy() -> None:
    execution, with_copies = measure_torch(TorchRunner(_Pair(), ["a", "b"], ["s", "d"]), {"a": X, "b": X}, 1, 3)
    assert execution == with_copies and execution.count == 3 and execution.batch == len(X)


class _Recorder:
    """Doubles its input and remembers the batch sizes."""

    input_names = ["x"]  # noqa: RUF012
    output_names = ["y"]  # noqa: RUF012

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        self.sizes.append(len(inputs["x"]))
        return {"y": inputs["x"] * 2}


@pytest.mark.parametrize(("pad", "sizes"), [(False, [4, 4, 2]), (True, [4, 4, 4])])
def test_partial_last_batch(pad, sizes) -> None:
    runner, x = _Recorder(), np.arange(10, dtype=np.float32).reshape(10, 1)
    np.testing.assert_array_equal(run_in_batches(runner, {"x": x}, 4, pad_last=pad)["y"], 2 * x)
    assert runner.sizes == sizes


@pytest.mark.parametrize(("inputs", "size"), [({}, 1), ({"x": X[:0]}, 1), ({"x": X, "y": X[:1]}, 1), ({"x": X}, 0)])
def test_batches_that_make_no_sense_are_refused(inputs, size) -> None:
    with pytest.raises(RunnerError, match="Cannot batch"):
        run_in_batches(_Recorder(), inputs, size)


def test_fixed_batch_is_run_padded() -> None:
    runner = OnnxRuntimeRunner(_scale_model(2))
    x = np.tile(X, (3, 1))[:5]
    padded = run_in_batches(runner, {"x": x}, 2, pad_last=True)["y"]
    np.testing.assert_array_equal(padded, OnnxRuntimeRunner(_scale_model()).run({"x": x})["y"])
    assert (fixed_batch(runner), fixed_batch(OnnxRuntimeRunner(_scale_model())), fixed_batch(_Recorder())) == (
        2,
        None,
        None,
    )
    check_inputs({"x": X}, [TensorSpec("x", "float32", (None, 3))])
    assert onnx.load_from_string(_scale_model(2)).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
