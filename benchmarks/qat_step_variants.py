"""The models whose steps are compared, each from the same float network: ours, torch's operator, other toolkits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from peers import provide_cuda_ext
from qat.placement.rules import DEFAULT_RULES, Rule
from qat_step_networks import Network
from timing import autocast

EVERYTHING = ("weighted layers", "residual add", "concat", "average pooling", "global pooling", "product")
"""Rules without those that leave layers float, and without attention, whose fused kernel would be taken apart."""
Variant = Callable[[Network, torch.device], tuple[nn.Module, int]]


def _moved(network: Network, device: torch.device, model: nn.Module | None = None) -> tuple[nn.Module, Tensor]:
    x = network.batch()[0].to(device)
    model = (network.build() if model is None else model).to(device)
    if x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return model, x


def _float(network: Network, device: torch.device) -> tuple[nn.Module, int]:
    return _moved(network, device)[0], 0


def _ours(rules: tuple[Rule, ...], mode: str = "frozen") -> Variant:
    def build(network: Network, device: torch.device) -> tuple[nn.Module, int]:
        model, x = _moved(network, device)
        qat.prepare(model.eval(), x, rules=rules, keep_float_logits=False)
        with autocast(device):
            qat.calibrate(model, [x], progress=False)
        quantizers = [quantizer for _, quantizer in qat.named_quantizers(model)]
        for quantizer in quantizers:
            quantizer.set_amax_mode(mode)
        return model, len(quantizers)

    return build


class _Native(nn.Module):
    """A layer with torch's own operators on its input and weight; scales that are constant."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        weight = layer.weight.detach()
        self.register_buffer("scale", weight.abs().flatten(1).amax(1).clamp_min(1e-6) / 127)
        self.register_buffer("zeros", torch.zeros_like(self.scale, dtype=torch.int32))
        self.register_buffer("input_scale", torch.tensor(4.0 / 127, device=weight.device))
        self.register_buffer("input_zero", torch.zeros((), dtype=torch.int32, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """What the layer computes, quantized."""
        m: Any = self.layer
        x = torch.fake_quantize_per_tensor_affine(x, self.input_scale, self.input_zero, -128, 127)
        weight = torch.fake_quantize_per_channel_affine(m.weight, self.scale, self.zeros, 0, -127, 127)
        if isinstance(m, nn.Conv2d):
            y: Tensor = m._conv_forward(x, weight, m.bias)
            return y
        return F.linear(x, weight, m.bias)


def _native(network: Network, device: torch.device) -> tuple[nn.Module, int]:
    model, _ = _moved(network, device)
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d | nn.Linear) and not isinstance(module, _Native):
                setattr(module, name, _Native(child))
                count += 2
    return model, count


def _modelopt(network: Network, device: torch.device) -> tuple[nn.Module, int]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.nn import TensorQuantizer

    model, x = _moved(network, device)
    model = mtq.quantize(model.eval(), mtq.INT8_DEFAULT_CFG, lambda m: m(x))
    used = [m for m in model.modules() if isinstance(m, TensorQuantizer) and m.is_enabled]
    return model, len(used)


def _pytorch_quantization(network: Network, device: torch.device) -> tuple[nn.Module, int]:
    provide_cuda_ext(device)
    from pytorch_quantization import quant_modules
    from pytorch_quantization.nn import TensorQuantizer

    quant_modules.initialize()
    try:
        model, x = _moved(network, device)
    finally:
        quant_modules.deactivate()
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        model.eval()(x)
    for quantizer in quantizers:
        quantizer.load_calib_amax()
        quantizer.disable_calib()
        quantizer.enable_quant()
    return model.to(device), len(quantizers)


ALL_RULES = tuple(rule for rule in DEFAULT_RULES if rule.name in EVERYTHING)

VARIANTS: Mapping[str, Variant] = {
    "float": _float,
    "ours": _ours(ALL_RULES),
    "ours, default placement": _ours(DEFAULT_RULES),
    "ours, learned scales": _ours(ALL_RULES, "learned"),
    "torch fake_quantize": _native,
    "Model Optimizer": _modelopt,
    "pytorch-quantization": _pytorch_quantization,
}
"""By name: builds the model, on the device and calibrated, and counts its quantizers."""
