from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qat.errors import EngineError
from qat.tensorrt.api import Library, load_library
from qat.tensorrt.options import BuildOptions
from qat.tensorrt.profiles import make_profiles

SPEC = "input:{}x3x16x16"


class _Writer:
    """A residual network, float or with Q/DQ pairs: stem, two convolutions with an identity, classifier."""

    def __init__(self, quantized: bool, dtype: type, channels: int, float_layers: tuple[str, ...]) -> None:
        self.quantized, self.dtype, self.channels, self.float_layers = quantized, dtype, channels, float_layers
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def add(self, op: str, inputs: list[str], output: str, name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
        return output

    def quantize(self, tensor: str, scale: float, name: str) -> str:
        if not self.quantized or name in self.float_layers:
            return tensor
        s = self.constant(f"{name}.scale", np.array(scale, self.dtype))
        z = self.constant(f"{name}.zero", np.zeros((), np.int8))
        q = self.add("QuantizeLinear", [tensor, s, z], f"{name}_q", f"{name}/QuantizeLinear")
        return self.add("DequantizeLinear", [q, s, z], f"{name}_dq", f"{name}/DequantizeLinear")

    def weight(self, name: str, *shape: int) -> str:
        w = (self.rng.standard_normal(shape) * 0.1).astype(np.float32)
        if not self.quantized or name in self.float_layers:
            return self.constant(f"{name}.weight", w.astype(self.dtype))
        scale = np.abs(w).reshape(shape[0], -1).max(1) / np.float32(127)
        codes = np.clip(np.rint(w / scale.reshape(-1, *[1] * (len(shape) - 1))), -127, 127)
        q = self.constant(f"{name}.weight", codes.astype(np.int8))
        s = self.constant(f"{name}.weight_scale", scale.astype(self.dtype))
        z = self.constant(f"{name}.weight_zero", np.zeros(shape[0], np.int8))
        return self.add("DequantizeLinear", [q, s, z], f"{name}.weight_dq", f"{name}/weight/DequantizeLinear", axis=0)

    def conv(self, x: str, name: str, channels_in: int) -> str:
        w = self.weight(name, self.channels, channels_in, 3, 3)
        b = self.constant(f"{name}.bias", np.zeros(self.channels, self.dtype))
        return self.add("Conv", [x, w, b], f"{name}_out", f"{name}/Conv", pads=[1] * 4, kernel_shape=[3, 3])

    def model(self) -> onnx.ModelProto:
        c = self.channels
        x = self.conv(self.quantize("input", 0.02, "in"), "stem", 3)
        a = self.quantize(self.add("Relu", [x], "stem_relu", "stem/Relu"), 0.03, "block")
        y = self.add("Relu", [self.conv(a, "conv1", c)], "conv1_relu", "conv1/Relu")
        y = self.conv(self.quantize(y, 0.03, "mid"), "conv2", c)
        y = self.add("Relu", [self.add("Add", [y, a], "sum", "block/Add")], "block_relu", "block/Relu")
        y = self.add("Flatten", [self.add("GlobalAveragePool", [y], "pooled", "pool")], "flat", "flatten")
        b = self.constant("fc.bias", np.zeros(10, self.dtype))
        self.add("Gemm", [self.quantize(y, 0.02, "head"), self.weight("fc", 10, c), b], "logits", "fc/Gemm", transB=1)
        kind = TensorProto.FLOAT if self.dtype == np.float32 else TensorProto.FLOAT16
        inputs = [helper.make_tensor_value_info("input", kind, ["batch", 3, 16, 16])]
        outputs = [helper.make_tensor_value_info("logits", kind, ["batch", 10])]
        graph = helper.make_graph(self.nodes, "toy", inputs, outputs, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.checker.check_model(model)
        return model


WriteToy = Callable[..., Path]


@pytest.fixture
def write_toy(tmp_path: Path) -> WriteToy:
    """write_toy(kind) -> path; kind is "qdq", "qdq16", "fp16" or "fp32"."""

    def write(kind: str = "qdq", channels: int = 32, float_layers: tuple[str, ...] = (), name: str = "") -> Path:
        dtype = np.float16 if kind.endswith("16") else np.float32
        path = tmp_path / (name or f"{kind}.onnx")
        onnx.save(_Writer(kind.startswith("qdq"), dtype, channels, float_layers).model(), path)
        return path

    return write


@pytest.fixture(scope="session")
def rtx() -> Library:
    """The real builder of TensorRT for RTX."""
    try:
        return load_library("tensorrt_rtx")
    except EngineError as error:
        pytest.skip(f"needs tensorrt_rtx: {error}")


def two_profiles(spec: str = SPEC) -> BuildOptions:
    """Batch 1, and batch 1 to 16 tuned for 8, for compute capability 8.9."""
    batches = [(1, 1), (1, 8), (1, 16)]
    low, best, high = ([spec.format(size) for size in sizes] for sizes in batches)
    return BuildOptions(profiles=tuple(make_profiles(low, best, high)), compute_capabilities=("8.9",))


@pytest.fixture
def options() -> BuildOptions:
    return two_profiles()
