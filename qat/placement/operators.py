"""Canonical names of operations: what the rules speak of, whether a module, a function or an operator computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.padding import _ConstantPadNd

from qat.quantizer import TensorQuantizer

PASS_SCALE = ("identity", "reshape", "slice", "max_pool", "zero_pad", "nearest", "concat")
"""Operations whose output holds values of their input and nothing else (or zero): one scale fits both sides, and
TensorRT moves a QuantizeLinear across them. A concat is one only where it runs in INT8."""

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MAX_POOL = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_AVG_POOL = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_GLOBAL_POOL = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_NORM = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)

_MODULES: tuple[tuple[Any, str], ...] = (
    (_CONV, "conv"),
    (_TRANSPOSED, "conv_transpose"),
    (nn.Linear, "linear"),
    (nn.MultiheadAttention, "multihead_attention"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent"),
    (_BatchNorm, "batch_norm"),
    (_NORM, "norm"),
    ((nn.Identity, _DropoutNd, TensorQuantizer), "identity"),
    ((nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle), "reshape"),
    (_MAX_POOL, "max_pool"),
    (_AVG_POOL, "avg_pool"),
    (nn.Softmax, "softmax"),
    (nn.Embedding, "embedding"),
    ((nn.Sigmoid, nn.Hardsigmoid), "sigmoid"),
    ((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.ELU, nn.Mish, nn.PReLU), "activation"),
)

_FUNCTIONS: dict[str, str] = {
    **dict.fromkeys(("add", "iadd", "radd"), "add"),
    **dict.fromkeys(("mul", "imul", "rmul", "multiply"), "mul"),
    **dict.fromkeys(("matmul", "rmatmul", "bmm", "mm"), "matmul"),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), "concat"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "conv"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "conv_transpose"),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "contiguous",
         "t", "T", "mT", "swapaxes", "swapdims", "movedim", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
         "clone", "view_as", "reshape_as"),
        "reshape",
    ),
    **dict.fromkeys(
        ("getitem", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "narrow", "select", "expand",
         "repeat", "expand_as", "flip", "roll", "unfold"),
        "slice",
    ),
    **dict.fromkeys(("to", "type", "type_as"), "identity"),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout"), "identity"),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d"), "max_pool"),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), "avg_pool"),
    **dict.fromkeys(("relu", "relu6", "leaky_relu", "silu", "hardswish", "gelu", "elu", "mish", "prelu"), "activation"),
    **dict.fromkeys(("sigmoid", "hardsigmoid"), "sigmoid"),
    **dict.fromkeys(("layer_norm", "group_norm", "rms_norm", "instance_norm"), "norm"),
    "linear": "linear",
    "scaled_dot_product_attention": "attention",
    "softmax": "softmax",
    "batch_norm": "batch_norm",
    "einsum": "einsum",
    "baddbmm": "einsum",
    "addmm": "einsum",
    "embedding": "embedding",
}  # fmt: skip


def module_op(module: nn.Module) -> str:
    """Canonical name of what a leaf module computes; "other" where no rule needs to know."""
    if isinstance(module, _GLOBAL_POOL):
        return "global_pool" if _is_one(module.output_size) else "avg_pool"
    if isinstance(module, nn.AdaptiveMaxPool2d) and _is_one(module.output_size):
        return "global_pool"
    if isinstance(module, _ConstantPadNd):
        return "zero_pad" if module.value == 0 else "pad"
    if isinstance(module, nn.Upsample):
        return "nearest" if module.mode == "nearest" else "resize"
    return next((op for classes, op in _MODULES if isinstance(module, classes)), "other")


def function_op(function: str, arguments: Mapping[int | str, Any], dims: int) -> str:
    """Canonical name of a function call.

    Args:
        function: its name without underscores at the ends, such as "cat" or "iadd".
        arguments: all of them, by position or keyword.
        dims: dimensions of its first tensor.
    """
    if function.startswith("adaptive_avg_pool"):
        return "global_pool" if _is_one(arguments.get(1, arguments.get("output_size"))) else "avg_pool"
    if function == "mean":
        spatial = arguments.get(1, arguments.get("dim"))
        given = [spatial] if isinstance(spatial, int) else list(spatial or [])
        return "global_pool" if sorted(d % dims for d in given) == list(range(2, dims)) and dims > 2 else "mean"
    if function == "pad":
        mode, value = arguments.get(2, arguments.get("mode", "constant")), arguments.get(3, arguments.get("value", 0))
        return "zero_pad" if mode == "constant" and not value else "pad"
    if function in ("interpolate", "upsample"):
        return "nearest" if arguments.get(3, arguments.get("mode", "nearest")) == "nearest" else "resize"
    op = _FUNCTIONS.get(function, "other")
    if op == "concat" and len(arguments.get(0, arguments.get("tensors", (0, 0)))) == 1:
        return "reshape" if function == "stack" else "identity"
    return op


def _is_one(size: Any) -> bool:
    return all(s == 1 for s in size) if isinstance(size, list | tuple) else bool(size == 1)
