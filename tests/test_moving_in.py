"""Scripts and checkpoints of pytorch-quantization. tests/data holds what that library itself wrote (2.2.1, CPU)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from moving_in_networks import NETWORKS
from torch import Tensor, nn

import qat
from qat import calib, quant_modules, tensor_quant
from qat import nn as quant_nn
from qat.errors import CalibrationError, DescriptorError
from qat.quantizer import AmaxMode, QuantizerState, named_quantizers
from qat.tensor_quant import QuantDescriptor

ROOT = Path(__file__).parents[1]
CASES = torch.load(ROOT / "tests" / "data" / "pytorch_quantization.pt", weights_only=True)["cases"]
OURS = SimpleNamespace(nn=quant_nn, modules=quant_modules, desc=tensor_quant)
CONVT_AXIS = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (quant_nn.QuantConv2d, quant_nn.QuantLinear, quant_nn.QuantConvTranspose2d):
        for which in ("input", "weight"):
            name = f"default_quant_desc_{which}"
            monkeypatch.setattr(cls, name, getattr(cls, name), raising=False)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script that made tests/data: its functions take any library with these names."""
    spec = importlib.util.spec_from_file_location("moving_in_reference", ROOT / "benchmarks/moving_in_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(name: str) -> nn.Module:
    with quant_modules.enable():
        return NETWORKS[name]()[0].eval()


def _run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(x)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _moved_in(case: str) -> tuple[nn.Module, dict[str, Any]]:
    if case == "transposed-max":
        quant_nn.QuantConvTranspose2d.set_default_quant_desc_weight(CONVT_AXIS)
    model = _build(case.split("-", maxsplit=1)[0])
    model.load_state_dict(CASES[case]["state_dict"])
    return model, CASES[case]


@pytest.mark.filterwarnings("ignore:.*TensorRT accepts the file", "ignore:.*learned the bounds")
@pytest.mark.parametrize("case", CASES)
def test_calibrated_and_qat_checkpoints_load_and_compute_the_same_numbers(case: str) -> None:
    model, expected = _moved_in(case)
    saved = expected["state_dict"]
    for name, quantizer in named_quantizers(model):
        assert quantizer.state is QuantizerState.QUANTIZING
        if f"{name}.clip.clip_value_max" in saved:
            lower, upper = (saved[f"{name}.clip.clip_value_{end}"] for end in ("min", "max"))
            assert torch.equal(quantizer.amax, torch.maximum(-lower, upper))
        elif f"{name}._amax" in saved:
            assert torch.equal(quantizer.amax.flatten(), saved[f"{name}._amax"].flatten())
    output, reference_output = _run(model, expected["input"]), expected["output"]
    assert output.shape == reference_output.shape
    # x * (127 / amax) there and x / (amax / 127) here, as in ONNX: float32 rounding, nothing else.
    torch.testing.assert_close(output, reference_output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["max", "percentile"])
def test_the_script_of_the_user_guide_runs_with_another_import(reference: ModuleType, kind: str) -> None:
    ours = reference.make_case(OURS, NETWORKS["convnet"], kind)
    theirs = CASES[f"convnet-{kind}"]
    for key, value in theirs["state_dict"].items():
        # A percentile falls into bins of another width; a dead channel has amax 0 there and the smallest scale here.
        tolerance = 1e-3 if kind == "percentile" and "_input" in key else 0.0
        torch.testing.assert_close(ours["state_dict"][key].flatten(), value.flatten(), rtol=tolerance, atol=1e-5)
    error = (ours["output"] - theirs["output"]).abs().max() / theirs["output"].abs().max()
    assert error < (1e-5 if kind == "max" else 0.02)


def test_model_optimizer_checkpoint_loads_by_the_lines_of_the_guide() -> None:
    guide = (ROOT / "docs/from_modelopt.md").read_text()
    case = torch.load(ROOT / "tests/data/model_optimizer.pt", weights_only=True)["cases"]["convnet"]
    model = NETWORKS["convnet"]()[0].eval()
    lines = next(block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "load_state_dict" in block)
    exec(lines, {"qat": qat, "model": model, "state": case["state_dict"]})
    layers = {name.rpartition(".")[0] for name, _ in named_quantizers(model)}
    assert layers == {"conv", "grouped", "pool", "fc"}
    torch.testing.assert_close(_run(model, case["input"]), case["output"], rtol=1e-5, atol=1e-6)


def test_a_loaded_checkpoint_exports(tmp_path: Path) -> None:
    model, case = _moved_in("convnet-qat")
    report = qat.export(model, (case["input"],), tmp_path / "m.onnx")
    assert len(report.quantized) == 7
    assert report.parity is not None


def test_transposed_convolution_without_its_axis_says_how_to_build_it() -> None:
    with pytest.raises(CalibrationError, match=r"1\._weight_quantizer\._amax.*6 values.*axis=1.*set_default") as error:
        _build("transposed").load_state_dict(CASES["transposed-max"]["state_dict"])
    assert "float" in str(error.value)


def test_an_amax_of_another_axis_is_refused() -> None:
    layer = quant_nn.QuantLinear(3, 3)
    state = layer.state_dict() | {"_weight_quantizer._amax": torch.ones(1, 3)}
    with pytest.raises(CalibrationError, match=r"dimension 1 but this quantizer has axis=0"):
        layer.load_state_dict(state)
    state["_weight_quantizer._amax"] = torch.ones(3, 3)
    with pytest.raises(CalibrationError, match="several dimensions"):
        layer.load_state_dict(state)


def test_unequal_learned_bounds_warn_and_pre_quant_scale_is_refused() -> None:
    quantizer = qat.TensorQuantizer()
    bounds = {"clip.clip_value_min": torch.tensor(-1.0), "clip.clip_value_max": torch.tensor(2.0)}
    with pytest.warns(UserWarning, match="learned the bounds -1 and 2"):
        quantizer.load_state_dict(bounds)
    assert quantizer.amax == 2
    quantizer.set_amax_mode(AmaxMode.LEARNED)
    quantizer.load_state_dict({key: value / abs(value) for key, value in bounds.items()})
    assert quantizer.amax == 1
    with pytest.raises(CalibrationError, match="_pre_quant_scale"):
        quantizer.load_state_dict({"_amax": torch.tensor(1.0), "_pre_quant_scale": torch.ones(3)})


def test_switches_keep_their_meaning() -> None:
    q = qat.TensorQuantizer(QuantDescriptor(calib_method="histogram"))
    assert isinstance(q._calibrator, calib.HistogramCalibrator)
    q.disable_quant()
    assert q.state is QuantizerState.PASSTHROUGH
    q.enable_calib()
    assert q.state is QuantizerState.CALIBRATING
    q(torch.linspace(-1, 1, 100))
    q.disable_calib()
    q.load_calib_amax("percentile", percentile=99.9, strict=True)
    assert q.state is QuantizerState.QUANTIZING and q.step_size == q.amax / 127 and q.maxbound == 127
    q.disable()
    q.enable_quant()
    q.enable_calib()
    assert q.state is QuantizerState.PASSTHROUGH
    qat.set_quantizer_state(q, QuantizerState.QUANTIZING)
    assert q.state is QuantizerState.PASSTHROUGH
    q.enable()
    assert q.state is QuantizerState.QUANTIZING
    assert (q.num_bits, q.axis, q.unsigned, q.narrow_range, q.fake_quant) == (8, None, False, False, True)
    with pytest.raises(CalibrationError, match="has seen no tensor"):
        qat.TensorQuantizer(name="x").load_calib_amax(strict=True)
    assert qat.TensorQuantizer(QuantDescriptor(amax=1.0))._calibrator is None


def test_use_fb_fake_quant_is_accepted_and_explained() -> None:
    assert quant_nn.TensorQuantizer.use_fb_fake_quant is False
    with pytest.warns(UserWarning, match=r"use_fb_fake_quant changes nothing.*qat\.export"):
        quant_nn.TensorQuantizer.use_fb_fake_quant = True
    assert quant_nn.TensorQuantizer.use_fb_fake_quant is True
    quant_nn.TensorQuantizer.use_fb_fake_quant = False


def test_short_names_are_the_quant_classes() -> None:
    assert quant_nn.Conv2d is quant_nn.QuantConv2d and quant_nn.LSTM is quant_nn.QuantLSTM
    with pytest.raises(AttributeError, match="Clip"):
        _ = quant_nn.Clip
    with pytest.raises(AttributeError, match="Add"):
        _ = quant_nn.Add


def test_tensor_quant_functions() -> None:
    x, amax = torch.randn(4, 3, 5), torch.tensor([0.5, 1.0, 2.0]).reshape(1, 3, 1)
    expected = qat.fake_quantize(x, amax.flatten(), 1, -127, 127)
    assert torch.equal(tensor_quant.fake_tensor_quant(x, amax), expected)
    codes, scale = tensor_quant.tensor_quant(x, amax)
    assert torch.equal(codes, codes.round()) and codes.abs().max() == 127
    torch.testing.assert_close(codes / scale, expected)
    assert tensor_quant.fake_tensor_quant(-x.abs() - 9, torch.tensor(1.0), 8, False, False).min() == -128 / 127
    with pytest.raises(DescriptorError, match="unsigned"):
        tensor_quant.fake_tensor_quant(x, amax, 8, True)
    with pytest.raises(ValueError, match="axis"):
        tensor_quant.fake_tensor_quant(x, amax.flatten())
    with pytest.raises(DescriptorError, match="negative"):
        tensor_quant.tensor_quant(x, -amax)
    with pytest.raises(AttributeError, match="UINT8"):
        _ = tensor_quant.QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR


def test_the_guide_names_every_public_name_and_each_of_ours_exists() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", (ROOT / "docs/from_pytorch_quantization.md").read_text(), re.MULTILINE)
    ours = {name for _, cell in rows for name in re.findall(r"`(qat(?:\.\w+)+)", cell)}
    assert len(ours) > 40
    for name in ours:
        found: Any = qat
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    listed = {name for cell, _ in rows for name in re.findall(r"`([\w.]+)", cell)}
    theirs = set((ROOT / "tests/data/pytorch_quantization_names.txt").read_text().split())
    assert theirs - listed == set()
