"""Why an instance of a torch.nn class cannot become its quant class in place."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from qat.quantizer import TensorQuantizer

_COMPUTING_METHODS = ("forward", "_conv_forward", "_output_padding", "__call__", "_call_impl")


def find_obstacle(module: nn.Module, float_class: type[nn.Module]) -> str | None:
    """Reason why `module`, an instance of the torch class `float_class`, must stay as it is; None where it need not.

    The quant class replaces the forward of the torch class, so whatever else computes in the module would be
    lost without a word. Each reason completes the sentence "the layer stays float because ...".
    """
    kind = type(module).__name__
    if any(isinstance(child, TensorQuantizer) for child in module.children()):
        return f"{kind} has quantizers already"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "its owner, nn.MultiheadAttention, reads the weight without calling this layer, which skips quantizers"
    if is_parametrized(module):
        return (
            f"{kind} has parametrized tensors ({', '.join(_parametrized(module))}); make them plain first: "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    return _own_computation(module, float_class) or _unusual_weight(module)


def _parametrized(module: nn.Module) -> list[str]:
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    return list(parametrizations)


def _own_computation(module: nn.Module, float_class: type[nn.Module]) -> str | None:
    if "forward" in vars(module):
        return "its forward was replaced on the instance (by a hook library, for example); remove that first"
    for owner in type(module).__mro__:
        if owner is float_class:
            return None
        for method in _COMPUTING_METHODS:
            if method in vars(owner):
                return f"{owner.__name__} is a subclass of nn.{float_class.__name__} with its own {method}"
    return None


def _unusual_weight(module: nn.Module) -> str | None:
    for name in ("weight", "weight_ih", "weight_ih_l0"):
        if name not in module._parameters and (name + "_orig" in module._parameters or hasattr(module, name)):
            return (
                f"its {name} is not a parameter but is recomputed (pruning, weight_norm, spectral_norm); make it plain "
                "first: torch.nn.utils.prune.remove, remove_weight_norm or remove_spectral_norm"
            )
        weight = module._parameters.get(name)
        if weight is None:
            continue
        if is_lazy(weight):
            return f"its {name} has no shape yet; run the model once first"
        if not weight.is_floating_point():
            return f"its {name} is {weight.dtype}, and only floating-point weights are quantized"
    return None
