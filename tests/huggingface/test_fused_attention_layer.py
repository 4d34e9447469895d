"""A fused attention kernel with a float mask, as the build log of tensorrt-rtx 1.7.1 lists it for an encoder."""

import pytest

from qat.tensorrt.layers import Layer, LayerTensor


@pytest.mark.parametrize(
    ("types", "precision"),
    [
        (("int8", "int8", "fp16", "int8"), "int8"),
        (("bool", "int8", "int8", "int8"), "int8"),
        (("fp16", "fp16", "fp16", "fp16"), "fp16"),
        (("int8", "int8", "fp16", "fp16"), "fp16"),  # values in float
    ],
)
def test_the_mask_does_not_decide_the_precision(types: tuple[str, ...], precision: str) -> None:
    inputs = tuple(LayerTensor(f"x{number}", dtype) for number, dtype in enumerate(types))
    layer = Layer("_gemm_mha_v2_myl0_6", "kgen", inputs, outputs=(LayerTensor("y", types[0]),), tactic="gemm_mha")
    assert layer.precision == precision
