"""The toolkits that benchmarks/peers_accuracy.py compares with: each makes a calibrated model of a float one.

No peer is a requirement of this project: put them on PYTHONPATH. Model Optimizer is `nvidia-modelopt`;
pytorch-quantization is tools/pytorch-quantization of NVIDIA's TensorRT repository, with a version.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qat.calibration import parse_method, run_batch, to_device
from qat.modes import evaluation_mode

if TYPE_CHECKING:
    from recipes.classification import Classification

CUDA_EXT = "pytorch_quantization.cuda_ext"
MOST_BINS = 16_384
"""Of a histogram of pytorch-quantization that mse is searched in, which quantizes all bins once for each of them."""


@dataclass(frozen=True)
class Calibrated:
    """A toolkit's PTQ model, and its top-1 in percent by method of calibration, of which it has the best.

    `quantizers` names those that quantize, `residual_adds` counts the additions with a quantized input, and `kernels`
    says what computes fake quantization.
    """

    model: nn.Module
    version: str
    ptq: dict[str, float]
    quantizers: tuple[str, ...]
    residual_adds: int
    kernels: str


def modelopt(base: Classification, float_model: nn.Module) -> Calibrated:
    """Model Optimizer with its INT8_DEFAULT_CFG: per-channel weights, per-tensor inputs, the maximum as amax."""
    mtq: Any = importlib.import_module("modelopt.torch.quantization")
    extensions: Any = importlib.import_module("modelopt.torch.quantization.extensions")
    quantizer_class = importlib.import_module("modelopt.torch.quantization.nn").TensorQuantizer
    model = mtq.quantize(float_model, mtq.INT8_DEFAULT_CFG, lambda model: run_calibration(base, model))
    names = tuple(n for n, q in model.named_modules() if isinstance(q, quantizer_class) and q.is_enabled)
    compiled = base.device.type == "cuda" and extensions.get_cuda_ext() is not None
    version = importlib.import_module("modelopt").__version__
    ptq = {"max": base.evaluate(model)[base.metric]}
    return Calibrated(model, version, ptq, names, 0, "its CUDA extension" if compiled else "its torch operators")


def pytorch_quantization(base: Classification, float_model: nn.Module) -> Calibrated:
    """pytorch-quantization as its ResNet-50 tutorial has it: histograms for inputs, the maximum for weights.

    The tutorial compares methods of calibration, so the best goes on: of the configuration's percentiles and, on a GPU,
    which it needs, mse, unless a histogram has grown beyond `MOST_BINS`. Layers are swapped by `quant_modules`, which
    leaves residual adds float.
    """
    kernels = provide_cuda_ext(base.device)
    importlib.import_module("absl.logging").set_verbosity("error")
    toolkit: Any = importlib.import_module("pytorch_quantization")
    quant_nn: Any = importlib.import_module("pytorch_quantization.nn")
    histogram = importlib.import_module("pytorch_quantization.tensor_quant").QuantDescriptor(calib_method="histogram")
    for layer in (quant_nn.QuantConv2d, quant_nn.QuantLinear):
        layer.set_default_quant_desc_input(histogram)
    toolkit.quant_modules.initialize()
    try:
        model = base.build(pretrained=False)
    finally:
        toolkit.quant_modules.deactivate()
    model.to(base.device).load_state_dict(float_model.state_dict())
    quantizers = {n: q for n, q in model.named_modules() if isinstance(q, quant_nn.TensorQuantizer)}
    for quantizer in quantizers.values():
        quantizer.disable_quant()
        quantizer.enable_calib()
    run_calibration(base, model)

    def load(method: str) -> float:
        name, options = parse_method(method)
        for quantizer in quantizers.values():
            chosen = (name,) if hasattr(quantizer._calibrator, "_calib_hist") else ()
            quantizer.disable_calib()
            quantizer.enable_quant()
            quantizer.load_calib_amax(*chosen, **(options if chosen else {}))
        model.to(base.device)
        return base.evaluate(model)[base.metric]

    methods = [f"percentile={p:g}" for p in base.config.quant.percentiles]
    bins = max(
        len(hist) for q in quantizers.values() if (hist := getattr(q._calibrator, "_calib_hist", None)) is not None
    )
    print(f"pytorch-quantization's largest histogram: {bins} bins", flush=True)
    if base.device.type == "cuda" and bins <= MOST_BINS:
        methods.append("mse")
    ptq = {}
    for method in methods:
        try:
            ptq[method] = load(method)
        except RuntimeError as error:  # mse, where a histogram that grew has not as many bins as edges say
            print(f"pytorch-quantization's {method}: {error}", file=sys.stderr)
    load(max(ptq, key=lambda method: ptq[method]))
    return Calibrated(model, toolkit.__version__, ptq, tuple(quantizers), 0, kernels)


@torch.no_grad()
def run_calibration(base: Classification, model: nn.Module) -> None:
    """Show the model the calibration batches of the configuration, in evaluation mode."""
    with evaluation_mode(model):
        for batch in islice(base.data.calibration, base.config.quant.batches):
            run_batch(model, to_device(batch, base.device))


def provide_cuda_ext(device: torch.device) -> str:
    """Let pytorch-quantization import its extension; says what computes then.

    It is compiled from `src` beside the package. Where that fails, and on a CPU, which does not use it,
    `fake_tensor_quant` takes its place.
    """
    spec = importlib.util.find_spec("pytorch_quantization")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("pytorch_quantization is not on PYTHONPATH")
    if device.type == "cuda":
        from torch.utils.cpp_extension import load

        folder = Path(spec.submodule_search_locations[0]).parent / "src"
        sources = [str(folder / name) for name in ("tensor_quant.cpp", "tensor_quant_gpu.cu")]
        try:
            sys.modules[CUDA_EXT] = load("pytorch_quantization_cuda_ext", sources)
            return "its CUDA extension"
        except Exception as error:  # what a compiler's absence and its errors raise has no common type
            print(f"pytorch-quantization's extension was not compiled: {error}", file=sys.stderr)
    stand_in: Any = ModuleType(CUDA_EXT)
    stand_in.fake_tensor_quant = fake_tensor_quant
    stand_in.fake_tensor_quant_with_axis = lambda inputs, amax, axis, *how: fake_tensor_quant(
        inputs, amax.reshape([-1 if dim == axis else 1 for dim in range(inputs.dim())]), *how
    )
    sys.modules[CUDA_EXT] = stand_in
    return "its torch operators" if device.type == "cpu" else "torch operators in place of its CUDA extension"


def fake_tensor_quant(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """The extension's clamp(round(x * bound / amax)) in float32, divided by the scale again.

    The lowest integer is -bound whatever `narrow_range` says: the extension does not pass it on to its kernels.
    """
    bound = 2.0 ** (num_bits - 1 + int(unsigned)) - 1
    scale = torch.full_like(amax, bound, dtype=torch.float32) / amax  # bound / amax would round twice
    quantized = (inputs.float() * scale).round().clamp(-bound, bound) / scale
    return torch.where(amax < 2.0**-24, 0.0, quantized).to(inputs.dtype)
