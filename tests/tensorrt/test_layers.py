import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qat.errors import EngineError
from qat.tensorrt.api import Library
from qat.tensorrt.engine import LoadedEngine
from qat.tensorrt.layers import Layer, LayerTensor, layers_from_inspector, onnx_nodes_in, short_type
from qat.tensorrt.log import LogHub
from qat.tensorrt.log_listing import layers_from_log

TENSORRT_10 = {
    "Layers": [
        {
            "Name": "Reformatting CopyNode for Input Tensor 0 to conv1/Conv + relu1/Relu",
            "LayerType": "Reformat",
            "Inputs": [{"Name": "x", "Dimensions": [1, 3, 8, 8], "Format/Datatype": "Row major linear FP32"}],
            "Outputs": [{"Name": "r", "Dimensions": [1, 3, 8, 8], "Format/Datatype": "Four wide channel Int8 format"}],
            "ParameterType": "Reformat",
            "Origin": "REFORMAT",
            "TacticName": "",
        },
        {
            "Name": "conv1/Conv + relu1/Relu",
            "LayerType": "CaskConvolution",
            "Inputs": [{"Name": "r", "Dimensions": [1, 3, 8, 8], "Format/Datatype": "Four wide channel Int8 format"}],
            "Outputs": [{"Name": "y", "Dimensions": [1, 32, 8, 8], "Format/Datatype": "Int8"}],
            "ParameterType": "Convolution",
            "Weights": {"Type": "Int8", "Count": 864},
            "Bias": {"Type": "Float", "Count": 32},
            "TacticName": "sm80_xmma_fprop_implicit_gemm_i8i8_i8i32_f32",
            "Metadata": "[ONNX Layer: conv1/Conv]\x1e[ONNX Layer: relu1/Relu]",
        },
        {
            "Name": "fc/MatMul",
            "LayerType": "gemm",
            "Inputs": [{"Name": "y", "Dimensions": [1, 32], "Format/Datatype": "Half"}],
            "Constants": [{"Name": "w", "Dimensions": [32, 10], "Format/Datatype": "Half"}],
            "Outputs": [{"Name": "z", "Dimensions": [1, 10], "Format/Datatype": "Half"}],
            "Metadata": "[ONNX Layer: fc/MatMul]",
        },
    ],
    "Bindings": ["x", "z"],
}


def _as_tensorrt_11() -> dict:
    """The same engine in TensorRT 11's schema: type and layout are separate fields."""
    text = json.dumps(TENSORRT_10)
    data = json.loads(text)
    for layer in data["Layers"]:
        for tensor in (*layer["Inputs"], *layer["Outputs"], *layer.get("Constants", [])):
            spelled = tensor.pop("Format/Datatype")
            tensor["Datatype"] = {"int8": "Int8", "fp16": "Half", "fp32": "Float"}[short_type(spelled)]
            tensor["Format"] = "(NHWC) Channel major format"
        layer["Metadata"] = layer.get("Metadata", "").replace("\x1e", "\x1f")
    del data["Bindings"]
    data["I/O Tensors"] = [{"Name": "x", "IOMode": "Input", "DataType": "Float"}]
    return data


def test_both_schemas_of_the_inspector_give_the_same_layers() -> None:
    ten = layers_from_inspector(json.dumps(TENSORRT_10))
    eleven = layers_from_inspector(json.dumps(_as_tensorrt_11()))
    assert ten == eleven
    assert [layer.precision for layer in ten] == ["fp32", "int8", "fp16"]
    assert [layer.is_weighted for layer in ten] == [False, True, True]
    assert ten[1].onnx_nodes == ("conv1/Conv", "relu1/Relu")


class _Inspector:
    """TensorRT 10 with dynamic shapes: formats are known only once an execution context gives the shapes."""

    execution_context = None

    def get_engine_information(self, form: object) -> str:
        data = json.loads(json.dumps(TENSORRT_10))
        if self.execution_context is None:
            for layer in data["Layers"]:
                for tensor in (*layer["Inputs"], *layer["Outputs"]):
                    tensor.update({"Format/Datatype": "N/A due to dynamic shapes", "Dimensions": "N/A"})
        return json.dumps(data)


class _Engine:
    num_io_tensors = 1

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def create_engine_inspector(self) -> _Inspector:
        return _Inspector()

    def create_execution_context(self) -> SimpleNamespace:
        return SimpleNamespace(set_input_shape=self.shapes.__setitem__)

    def get_tensor_name(self, index: int) -> str:
        return "x"

    def get_tensor_mode(self, name: str) -> str:
        return "in"

    def get_tensor_location(self, name: str) -> str:
        return "device"

    def get_tensor_profile_shape(self, name: str, index: int) -> list[list[int]]:
        return [[1, 3], [8, 3], [16, 3]]


def test_formats_that_depend_on_shapes_are_read_at_the_tuned_shape() -> None:
    trt = SimpleNamespace(
        TensorIOMode=SimpleNamespace(__members__={"INPUT": "in"}),
        TensorLocation=SimpleNamespace(DEVICE="device"),
        LayerInformationFormat=SimpleNamespace(JSON="json"),
    )
    engine = _Engine()
    layers = LoadedEngine(Library("tensorrt", "10.16", trt, LogHub()), engine, None, Path("e")).layers()
    assert [layer.precision for layer in layers] == ["fp32", "int8", "fp16"]
    assert engine.shapes == {"x": (8, 3)}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Layers": 3}', '{"Layers": ["conv1", "conv2"]}'])
def test_other_text_is_refused(text) -> None:
    with pytest.raises(EngineError):
        layers_from_inspector(text)


@pytest.mark.parametrize(
    ("spelled", "short"),
    [
        ("Half", "fp16"),
        ("Float", "fp32"),
        ("BF16", "bf16"),
        ("BFloat16", "bf16"),
        ("Channel major FP16 format where channel % 8 == 0", "fp16"),
        ("Thirty-two wide channel vectorized row major Int8 format", "int8"),
        ("FP8", "fp8"),
        ("Int32", "int32"),
        ("odd", "unknown"),
    ],
)
def test_every_spelling_of_a_type_is_read(spelled, short) -> None:
    assert short_type(spelled) == short


def test_node_names_with_brackets_and_repeats() -> None:
    text = "[ONNX Layer: a[0]/Conv]\x1f[ONNX Layer: b]\x1f[ONNX Layer: a[0]/Conv]"
    assert onnx_nodes_in(text) == ("a[0]/Conv", "b")


def _tensor(dtype: str, *shape: int) -> LayerTensor:
    return LayerTensor("t", dtype, shape)


@pytest.mark.parametrize(
    ("layer", "precision"),
    [
        # Float scales and bias do not make an INT8 convolution float.
        (("correlation", ["int8"], [_tensor("int8", 32, 3, 3, 3), _tensor("fp32", 1, 32, 1, 1)]), "int8"),
        (("correlation", ["fp32"], [_tensor("int8", 32, 3, 3, 3)]), "fp32"),
        (("correlation", ["int8"], [_tensor("fp16", 32, 3, 3, 3)]), "int8 weight missing"),
        (("gemm", ["int8", "int8"], []), "int8"),
        (("gemm", ["int8", "fp16"], []), "fp16"),
        (("kgen", ["int8"], []), "fp16"),
    ],
)
def test_precision_of_a_kernel(layer, precision) -> None:
    kind, inputs, constants = layer
    made = Layer("x", kind, tuple(_tensor(t, 1, 8) for t in inputs), tuple(constants), (_tensor("fp16", 1, 8),))
    assert made.precision == ("fp16" if precision == "int8 weight missing" else precision)


def test_small_convolution_fused_into_a_generated_kernel_counts_as_int8() -> None:
    constants = (_tensor("fp32", 1, 96, 1, 1), _tensor("int8", 96, 4, 1, 1))
    name = "__myl_MulSiluMulMinMaxRounCastCorrMul_myl0_18"
    fused = Layer(name, "kgen", (_tensor("fp32", 1, 4, 1, 1),), constants, (_tensor("fp32", 1, 96, 1, 1),))
    assert fused.is_weighted and fused.precision == "int8"
    assert not Layer("__myl_MulAddRelu_myl0_1", "kgen").is_weighted


def test_layers_survive_json() -> None:
    for layer in layers_from_inspector(json.dumps(TENSORRT_10)):
        assert Layer.from_dict(json.loads(json.dumps(layer.to_dict()))) == layer


LISTING = """Layers:
Name: a/Conv_myl0_1, LayerType: correlation, Inputs: [ { Name: x, Dimensions: [1,4,8,8], Strides: [1], Datatype: Int8, \
Format: (NHWC) Channel major format }], Constants: [ { Name: w, Dimensions: [32,4,3,3], Strides: [1], Datatype: Int8, \
Format: (NHWC) }], Outputs: [ { Name: y, Dimensions: [1,32,8,8], Strides: [1], Datatype: Float, Format: (NHWC) }], \
TacticName: t, StreamId: 0, Metadata: [ONNX Layer: a/Conv]\x1f[ONNX Layer: a/w]
Name: __mye1_myl0_4, LayerType: signal, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, EventId: 1, \
Metadata: \n\
Name: a/Conv [profile 1]_myl1_0, LayerType: gemm, Inputs: [ { Name: x [profile 1], Dimensions: [-1,4], Strides: [1], \
Datatype: Half, Format: (Linear) }], Outputs: [ { Name: y, Dimensions: [-1,32], Strides: [1], Datatype: Half, Format: \
(Linear) }], TacticName: , StreamId: 0
Name: __myl_Relu_myl1_1, LayerType: kgen, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, Metadata:
Name: something new

I/O Tensors:
 Name: x, IOMode: Input
"""


def test_build_log_listing() -> None:
    layers = layers_from_log(["other", "Layers:\nName: old", LISTING, "after"])
    assert [layer.kind for layer in layers] == ["correlation", "signal", "gemm", "kgen", "unknown"]
    assert [layer.profile for layer in layers] == [0, 0, 1, 1, 0]
    assert layers[0].onnx_nodes == ("a/Conv", "a/w")
    assert layers[0].constants == (LayerTensor("w", "int8", (32, 4, 3, 3)),)
    assert layers[2].name == "a/Conv_myl1_0" and layers[2].inputs[0].shape == (-1, 4)
    assert layers_from_log(["nothing"]) == []
