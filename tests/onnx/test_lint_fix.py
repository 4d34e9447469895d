from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import GraphWriter, attention, random_input, residual
from lint_cases import BAD, MORE_BAD
from onnx import numpy_helper
from onnx_models import Residual, Tokens, calibrated, inputs_for

from qat.onnx import export
from qat.onnx.lint import assert_clean, fix, lint
from qat.runtime import OnnxRuntimeRunner

REPAIRABLE = {"zero-point-missing", "scale-vector", "bias-quantized", "zero-point-nonzero"}


def run(model: onnx.ModelProto) -> Any:
    return next(iter(OnnxRuntimeRunner(model.SerializeToString()).run(random_input(model)).values()))


def shifted_uint8() -> onnx.ModelProto:
    """A file as ONNX Runtime's own tools write it: UINT8 around 128, also for the weight."""
    w = GraphWriter()
    codes = w.rng.integers(1, 255, (32, 32, 3, 3)).astype(np.uint8)
    stored = [w.constant("w", codes), w.constant("ws", np.full(32, 0.002, np.float32))]
    stored.append(w.constant("wz", np.full(32, 128, np.uint8)))
    weight = w.add("DequantizeLinear", stored, "w/DequantizeLinear", axis=0)
    w.add("Conv", [w.qdq("x", "q", zero=np.uint8(128)), weight], "y", pads=[1] * 4)
    return w.model("y")


def float_weights(perm: bool = False) -> onnx.ModelProto:
    """Float weights behind Q/DQ, also behind a Transpose, some of them beyond the scale."""
    w = GraphWriter(13)
    x = w.add("MatMul", [w.qdq("x", "xq", 0.03), w.qdq(w.normal("w1", 32, 48), "w1q", [0.002] * 48, axis=1)], "h")
    stored = w.normal("w2", 16, 48)
    stored = w.add("Transpose", [stored], "w2t", perm=[1, 0])
    axis, scale = (1, [0.0015] * 16) if perm else (None, 0.0015)
    w.add("MatMul", [w.qdq(x, "hq", 0.01), w.qdq(stored, "w2q", scale, axis=axis)], "y")
    return w.model("y", {"x": (4, 32)})


def bias_behind_matmul() -> onnx.ModelProto:
    w = GraphWriter()
    product = w.add("MatMul", [w.qdq("x", "q"), w.weight("w", (32, 32), 1)], "p")
    w.add("Add", [w.qdq(w.normal("b", 32), "bias", 0.002), product], "y")
    return w.model("y", {"x": (4, 32)})


EXACT = {
    "uint8 around 128": shifted_uint8,
    "int32 bias": lambda: BAD["bias-quantized"]()[0],
    "int8 bias": lambda: next(case for name, case in MORE_BAD if name == "bias-quantized")()[0],
    "bias behind MatMul": bias_behind_matmul,
    "scale vector": lambda: BAD["scale-vector"]()[0],
    "float weights": float_weights,
    "transposed float weights": lambda: float_weights(True),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_repaired_file_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    model = EXACT[name]()
    before = model.SerializeToString()
    report = fix(model, tmp_path / "fixed.onnx")
    assert report.changes and model.SerializeToString() == before
    fixed = onnx.load(tmp_path / "fixed.onnx")
    onnx.checker.check_model(fixed, full_check=True)
    assert_clean(fixed)
    np.testing.assert_allclose(run(fixed), run(model), rtol=1e-6, atol=1e-6)
    again = fix(tmp_path / "fixed.onnx")
    assert not again.changes and again.model.SerializeToString() == fixed.SerializeToString()


def test_repairs_that_are_promised_are_kept() -> None:
    for name, case in [*BAD.items(), *MORE_BAD]:
        model, _ = case()
        promised = {(f.rule, f.node) for f in lint(model).findings if f.repairable}
        left = {(f.rule, f.node) for f in lint(fix(model).model).findings if f.repairable}
        assert not left, name
        assert name in REPAIRABLE or not promised, name


def test_missing_zero_point_becomes_int8() -> None:
    w = GraphWriter()
    w.qdq(w.add("Relu", ["x"], "relu"), "q", 4 / 127, zero=None)
    model = w.model("q/DequantizeLinear")
    fixed = fix(model).model
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in fixed.graph.initializer}
    for node in [node for node in fixed.graph.node if "Linear" in node.op_type]:
        assert stored[node.input[2]].dtype == np.int8 and not stored[node.input[2]].any()
    x = random_input(model)["x"]
    assert x.max() < 4  # within amax the UINT8 codes of the old file and the INT8 codes of the new one are the same
    np.testing.assert_array_equal(run(fixed), run(model))


def test_folding_gives_the_codes_of_our_own_export(tmp_path: Path) -> None:
    for model_class in (Residual, Tokens):
        model = calibrated(model_class())
        x = inputs_for(model)
        small = export(model, x, tmp_path / "int8.onnx", verify=False)
        large = export(model, x, tmp_path / "float.onnx", int8_weights=False, verify=False)
        folded = fix(large.path, tmp_path / "folded.onnx")
        assert len(folded.changes) >= 3 and (tmp_path / "folded.onnx").stat().st_size < large.size

        def codes(path: Path) -> list[bytes]:
            tensors = onnx.load(path).graph.initializer
            return sorted(numpy_helper.to_array(t).tobytes() for t in tensors if t.name.endswith("_int8"))

        assert codes(tmp_path / "folded.onnx") == codes(small.path) and codes(small.path)
        results = [OnnxRuntimeRunner(path).run({"x": x.numpy()})["output"] for path in (large.path, folded.path)]
        np.testing.assert_array_equal(*results)


def test_what_is_not_safe_is_left() -> None:
    for name in ("code-type", "scale-value", "weight-axis", "residual-both", "scale-computed"):
        model, _ = BAD[name]()
        report = fix(model)
        assert not report.changes and report.model is model


@pytest.mark.parametrize("model", [residual(), attention()], ids=["residual", "attention"])
def test_a_good_file_is_written_unchanged(model: onnx.ModelProto, tmp_path: Path) -> None:
    report = fix(model, tmp_path / "same.onnx")
    assert not report.changes and onnx.load(tmp_path / "same.onnx") == model
