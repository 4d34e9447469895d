from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx_models import Residual, Tokens, calibrated, initializers, inputs_for, replace_initializer
from torch import nn

from qat.errors import ExportError
from qat.onnx import check_parity, export

Mutation = Callable[[Any, dict[str, Any]], None]


def _node(proto: Any, name: str) -> Any:
    return next(node for node in proto.graph.node if node.name == name)


def _scale_by(name: str, factor: float) -> Mutation:
    return lambda proto, stored: replace_initializer(proto, name, (stored[name] * factor).astype(np.float32))


def _one_ulp(proto: Any, stored: dict[str, Any]) -> None:
    name = "stem._input_quantizer.scale"
    replace_initializer(proto, name, np.nextafter(stored[name], np.float32(1)))


def _zero_point(proto: Any, stored: dict[str, Any]) -> None:
    replace_initializer(proto, "fc._input_quantizer.zero_point", np.array(3, np.int8))


def _wrong_axis(proto: Any, stored: dict[str, Any]) -> None:
    # Depthwise weight (16, 1, 3, 3) behind a square transposition of its scales: reverse the channels' order.
    replace_initializer(proto, "depthwise._weight_quantizer.scale", stored["depthwise._weight_quantizer.scale"][::-1])


def _one_code(proto: Any, stored: dict[str, Any]) -> None:
    codes = stored["depthwise.weight_int8"].copy()
    codes[5, 0, 1, 1] ^= 1
    replace_initializer(proto, "depthwise.weight_int8", codes)


def _no_batchnorm(proto: Any, stored: dict[str, Any]) -> None:
    node = _node(proto, "bn/BatchNormalization")
    source, result = node.input[0], node.output[0]
    proto.graph.node.remove(node)
    for other in proto.graph.node:
        for index, name in enumerate(other.input):
            if name == result:
                other.input[index] = source


def _epsilon(proto: Any, stored: dict[str, Any]) -> None:
    for attribute in _node(proto, "bn/BatchNormalization").attribute:
        if attribute.name == "epsilon":
            attribute.f = 1e-3


def _unquantized_residual(proto: Any, stored: dict[str, Any]) -> None:
    source = _node(proto, "add._other_quantizer/QuantizeLinear").input[0]
    add = _node(proto, "add/Add")
    add.input[1] = source


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "activation scale 1 % off": (_scale_by("pool._input_quantizer.scale", 1.01), "pool._input_quantizer"),
    "activation scale one ulp off": (_one_ulp, "stem._input_quantizer"),
    "weight scale 0.1 % off": (_scale_by("fc._weight_quantizer.scale", 1.001), "fc._weight_quantizer"),
    "zero-point": (_zero_point, "fc._input_quantizer"),
    "scales along the wrong channels": (_wrong_axis, "depthwise._weight_quantizer"),
    "one weight code": (_one_code, "depthwise._weight_quantizer"),
    "missing BatchNorm": (_no_batchnorm, "depthwise._input_quantizer"),
    "BatchNorm epsilon": (_epsilon, "depthwise._input_quantizer"),
    "bias 0.1 % off": (_scale_by("depthwise.bias", 1.001), "pool._input_quantizer"),
    "residual not quantized": (_unquantized_residual, "pool._input_quantizer"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = calibrated(Residual())
    nn.init.uniform_(model.depthwise.bias, 1.0, 2.0)
    path = tmp_path_factory.mktemp("parity") / "m.onnx"
    return model, export(model, inputs_for(model), path).path


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_real_fault_is_found_and_named(exported: tuple[nn.Module, Path], tmp_path: Path, name: str) -> None:
    model, path = exported
    mutate, culprit = MUTATIONS[name]
    proto = onnx.load(path)
    mutate(proto, initializers(path))
    onnx.save(proto, tmp_path / "bad.onnx")
    report = check_parity(model, tmp_path / "bad.onnx", [inputs_for(model, 8)])
    assert not report.passed
    assert culprit in report.worst()


def test_the_right_file_passes_on_many_batches(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    report = check_parity(model, path, [inputs_for(model, 16) * 2 for _ in range(10)], per_layer=True)
    assert report.passed and report.batches == 10 and not report.unmatched
    assert report.outputs[0].sqnr_db > 30 and report.outputs[0].argmax_agreement is not None
    assert max(row.relative for row in report.layers) < 1e-5
    assert {row.kind for row in report.layers} == {"activation", "weight", "output"}
    assert "stem._input_quantizer" in report.table()


def test_rounding_that_flips_codes_is_not_a_fault(exported: tuple[nn.Module, Path], tmp_path: Path) -> None:
    """A bias moved by rounding's size flips codes now and then: the outputs differ, the verdict does not."""
    model, path = exported
    proto = onnx.load(path)
    bias = initializers(path)["depthwise.bias"]
    replace_initializer(proto, "depthwise.bias", (bias * np.float32(1 + 2e-5)).astype(np.float32))
    onnx.save(proto, tmp_path / "rounded.onnx")
    report = check_parity(model, tmp_path / "rounded.onnx", [inputs_for(model, 64) for _ in range(4)], per_layer=True)
    assert report.outputs[0].relative > 1e-4
    assert report.passed


def test_a_transposed_square_weight_is_compared_in_its_own_layout(tmp_path: Path) -> None:
    model = calibrated(Tokens())
    path = export(model, inputs_for(model), tmp_path / "m.onnx").path
    proto, stored = onnx.load(path), initializers(path)
    replace_initializer(proto, "q.weight_transposed_int8", stored["q.weight_transposed_int8"].T)
    onnx.save(proto, path)
    assert "q._weight_quantizer" in check_parity(model, path, [inputs_for(model)]).worst()


def test_export_refuses_a_wrong_file_and_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = calibrated(Residual())
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def flipped(weight: Any, scale: Any, axis: Any, narrow: bool = True) -> Any:
        return np.zeros(weight.shape, np.int8)

    monkeypatch.setattr("qat.onnx.weights.quantize_weight", flipped)
    with pytest.raises(ExportError, match=r"more than rounding.*_weight_quantizer"):
        export(model, inputs_for(model), path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_a_file_of_another_model_or_no_batches(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    with pytest.raises(ExportError, match="no batches"):
        check_parity(model, path, [])
    with pytest.raises(ExportError, match="1 inputs"):
        check_parity(model, path, [(inputs_for(model), inputs_for(model))])
