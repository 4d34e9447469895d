"""Must show 1 of issue 3: each pattern against the quantized edges that TensorRT wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import placement_networks as net
import qat
from placement_validator import calibrated, quantized_edges
from qat.placement import prepare

TOKENS = torch.randn(2, 20, 32)

# network, inputs, quantizer -> operators that read what it quantizes, layers and operations left float
POOL: dict[str, tuple[Any, Any, dict[str, str], set[str]]] = {
    # Kind: residual add (TensorRT#1992, #3197): identity quantized, by the next convolution's quantizer.
    "basic": (
        net.Basic,
        net.image(),
        {"conv1.0._input_quantizer": "add conv2d", "conv2.0._input_quantizer": "conv2d"},
        set(),
    ),
    "bottleneck": (
        net.Bottleneck,
        net.image(64),
        {
            "reduce.0._input_quantizer": "add conv2d",
            "conv.0._input_quantizer": "conv2d",
            "expand.0._input_quantizer": "conv2d",
        },
        set(),
    ),
    "downsample": (
        net.Downsample,
        net.image(),
        {
            "conv1.0._input_quantizer": "conv2d conv2d",
            "conv2.0._input_quantizer": "conv2d",
            "_add_quantizer": "add",
        },
        set(),
    ),
    "preactivation": (
        net.PreActivation,
        net.image(),
        {"conv1._input_quantizer": "conv2d", "conv2._input_quantizer": "conv2d", "_add_quantizer": "add"},
        set(),
    ),
    "inverted": (
        net.Inverted,
        net.image(),
        {
            "blocks.0.0.0._input_quantizer": "add conv2d",
            "blocks.0.2.0._input_quantizer": "conv2d",
            "blocks.0.4.0._input_quantizer": "conv2d",
            "blocks.1.0.0._input_quantizer": "add conv2d",
            "blocks.1.2.0._input_quantizer": "conv2d",
            "blocks.1.4.0._input_quantizer": "conv2d",
        },
        set(),
    ),
    # Kind: SiLU (TensorRT#3629): no quantizer between a convolution and its activation.
    "squeeze_excite": (
        net.SqueezeExcite,
        net.image(),
        {"conv.0._input_quantizer": "add conv2d", "project.0._input_quantizer": "conv2d"},
        {"pool", "fc1", "fc2", "mul"},
    ),
    # Kind: concat (TensorRT#3861): one scale for all that is joined; average pooling in and out.
    "densenet": (
        net.DenseNet,
        net.image(),
        {
            "stem._input_quantizer": "conv2d",
            "block.a.conv._input_quantizer": "conv2d",
            "block.b._concat_quantizer": "batch_norm batch_norm",
            "block.b.conv._input_quantizer": "conv2d",
            "transition._input_quantizer": "conv2d",
            "pool._input_quantizer": "avg_pool2d",
            "last._input_quantizer": "conv2d",
        },
        set(),
    ),
    # Kind: average pooling: in INT8 on both sides or on none (a Q/DQ of its own is slower than pooling in FP16).
    "pooled for two": (
        net.PooledForTwo,
        net.image(),
        {"stem._input_quantizer": "conv2d", "a._input_quantizer": "conv2d", "b._input_quantizer": "conv2d"},
        {"pool"},
    ),
    "inception": (
        net.Inception,
        net.image(),
        {
            "a.0._input_quantizer": "avg_pool2d conv2d conv2d",
            "b2.0._input_quantizer": "conv2d",
            "c.0._input_quantizer": "conv2d",
            "after.0._input_quantizer": "conv2d",
        },
        set(),
    ),
    "unet": (
        net.UNet,
        net.image(),
        {
            "down1.0._input_quantizer": "conv2d",
            "down2.0._input_quantizer": "conv2d conv2d",
            "up._input_quantizer": "conv_transpose2d",
        },
        {"head"},
    ),
    "vit": (
        lambda: net.ViTBlock(fused=False),
        TOKENS,
        {
            "qkv._input_quantizer": "linear",
            "_matmul_input_quantizer": "matmul",
            "_matmul_other_quantizer": "matmul",
            "_matmul_input_quantizer_2": "matmul",
            "_matmul_other_quantizer_2": "matmul",
            "proj._input_quantizer": "linear",
            "fc1._input_quantizer": "linear",
            "fc2._input_quantizer": "linear",
            "_add_quantizer": "add",
            "_add_quantizer_2": "add",
        },
        set(),
    ),
    "vit_fused": (
        lambda: net.ViTBlock(fused=True),
        TOKENS,
        {
            "qkv._input_quantizer": "linear",
            "_attention._query_quantizer": "matmul",
            "_attention._key_quantizer": "transpose",
            "_attention._softmax_quantizer": "matmul",
            "_attention._value_quantizer": "matmul",
            "proj._input_quantizer": "linear",
            "fc1._input_quantizer": "linear",
            "fc2._input_quantizer": "linear",
            "_add_quantizer": "add",
            "_add_quantizer_2": "add",
        },
        set(),
    ),
    "local_attention": (
        net.LocalAttention,
        TOKENS,
        {
            "qkv._input_quantizer": "linear",
            "_attention._query_quantizer": "matmul",
            "_attention._key_quantizer": "transpose",
            "_attention._softmax_quantizer": "matmul",
            "_attention._value_quantizer": "matmul",
            "local._input_quantizer": "linear",
            "_add_quantizer": "add",
        },
        set(),
    ),
    "separable": (
        net.Separable,
        net.image(),
        {"depthwise.0._input_quantizer": "conv2d", "pointwise.0._input_quantizer": "conv2d"},
        {"grouped", "small"},
    ),
    "shared_weight": (
        net.Shared,
        net.image(),
        {"conv._input_quantizer": "conv2d conv2d conv2d conv2d", "_add_quantizer": "add"},
        set(),
    ),
    "two_inputs": (
        net.TwoInputs,
        (net.image(), net.image()),
        {"left._input_quantizer": "conv2d", "right._input_quantizer": "conv2d"},
        {"both", "mul"},
    ),
    "two_outputs": (
        net.TwoOutputs,
        net.image(),
        {"body.0._input_quantizer": "conv2d", "box._input_quantizer": "conv2d"},
        {"classes", "global_pool"},
    ),
    "recurrent": (
        net.Recurrent,
        torch.randn(2, 5, net.C),
        {"embed._input_quantizer": "linear", "mix._input_quantizer": "linear"},
        {"lstm", "head"},
    ),
    # Nothing between a zero padding and its convolution; other paddings are no part of the convolution.
    "padded": (
        net.Padded,
        net.image(),
        {"_pad_input_quantizer": "pad", "pad._input_quantizer": "pad", "third._input_quantizer": "conv2d"},
        set(),
    ),
    "functional": (
        net.Functional,
        net.image(),
        {"_input_quantizer": "conv2d", "_matmul_input_quantizer": "matmul", "_matmul_other_quantizer": "matmul"},
        set(),
    ),
}


@pytest.mark.parametrize("name", POOL)
def test_quantized_edges(name: str) -> None:
    build, inputs, edges, left_float = POOL[name]
    model = prepare(build(), inputs)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    found = quantized_edges(calibrated(model, args), args)
    assert {key: " ".join(users) for key, users in found.items()} == edges
    assert set(qat.summary(model).left_float) == left_float


@pytest.mark.parametrize("name", POOL)
def test_passing_through_changes_nothing(name: str) -> None:
    """Outputs bit for bit, every state-dict key, modes, and a float state dict still loads."""
    build, inputs, _, _ = POOL[name]
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    model = build()
    nn.init.normal_(next(model.parameters()))
    state, modes = {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]
    model.eval()
    before = list(_tensors(model(*args)))
    model.train()
    assert prepare(model, inputs) is model
    assert [m.training for m in model.modules()][: len(modes)].count(False) == 0
    qat.set_quantizer_state(model.eval(), qat.QuantizerState.PASSTHROUGH)
    assert all(torch.equal(a, b) for a, b in zip(before, _tensors(model(*args)), strict=True))
    assert set(state) <= set(model.state_dict())
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("_quantizer" in key for key in missing)


def _tensors(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else [value]
