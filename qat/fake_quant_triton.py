"""Fake quantization on a GPU, for tensors that fill their memory without gaps, in any memory format.

Forward: one read, one write, and one bit an element that says whether the code lies within the bounds. Backward: reads
the gradient and the bits. With a learned amax the backward reads x instead, and sums amax's gradient in the same pass.

They give the bits of the torch implementation in `qat.fake_quant`, which stays the reference and the fallback. Imported
at the first use on a GPU. TRITON_INTERPRET=1 runs them on a CPU, which is how they are tested without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.fake_quant_triton_kernels import (
    ONE,
    ONE_AN_ELEMENT,
    ONE_FOR_EIGHT,
    backward_kernel,
    forward_kernel,
    select_kernel,
)
from qat.triton_launch import launch

ROWS = 512
"""Bytes of eight bits that one program handles: 4096 elements, so that a thread reads and writes 16 bytes at once."""
WARPS = 8
WITHIN, AND_POSITIVE = 1, 2
"""What `forward` keeps: the bits "within the bounds", and after them the bits "not at or below zero"."""


def is_dense(x: Tensor) -> bool:
    """True where the elements fill a block of memory without gaps, in one of the memory formats that layers use."""
    if x.is_contiguous():
        return True
    dims = x.dim()
    if dims == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return dims == 5 and x.is_contiguous(memory_format=torch.channels_last_3d)


def forward(
    x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int, keep: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Fake-quantize a dense x.

    Args:
        keep: 0, WITHIN or AND_POSITIVE.

    Returns:
        The result, with x's memory format, and the bits, uint8, one byte for eight elements in the order of x's
        memory.
    """
    y = torch.empty_like(x)
    size = x.numel()
    bits = torch.empty((size + 7) // 8 * keep, dtype=torch.uint8, device=x.device) if keep else None
    channels, stride, scales = _layout(x, amax, axis)
    constants = (min_bound, max_bound, scales, keep)
    _launch(forward_kernel, size, (x, amax, y, bits), (channels, stride), constants)
    return y, bits


def select(grad: Tensor, bits: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The gradient where the code was within the bounds, else zero; `strides` are those of the x of the bits."""
    if grad.stride() != strides:
        grad = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
    out = torch.empty_like(grad)
    _launch(select_kernel, out.numel(), (out, grad, bits), (), (False,))
    return out


def unpack(bits: Tensor, like: tuple[Any, ...]) -> Tensor:
    """Ones where x was not at or below zero, and zeros; `like` is x's (shape, strides, dtype)."""
    shape, strides, dtype = like
    out = torch.empty_strided(shape, strides, dtype=dtype, device=bits.device)
    _launch(select_kernel, out.numel(), (out, None, bits), (), (True,))
    return out


def backward(
    grad: Tensor, x: Tensor, amax: Tensor, axis: int | None, min_bound: int, max_bound: int, learned: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradient where the code lies within the bounds, else zero; x dense, the result has its memory format.

    Returns:
        It, and with `learned` (per tensor only) the gradient to the scale, float32, shape ().
    """
    if grad.stride() != x.stride():
        grad = torch.empty_like(x, dtype=grad.dtype).copy_(grad)
    out = torch.empty_like(grad)
    sums = torch.empty(_programs(x.numel()), dtype=torch.float32, device=x.device) if learned else None
    channels, stride, scales = _layout(x, amax, axis)
    constants = (min_bound, max_bound, scales, learned)
    _launch(backward_kernel, x.numel(), (grad, x, amax, out, sums), (channels, stride), constants)
    return out, None if sums is None else sums.sum()


def _layout(x: Tensor, amax: Tensor, axis: int | None) -> tuple[int, int, int]:
    """Number of channels, elements between them, and for how many neighbours one scale is."""
    if axis is None:
        return 1, 1, ONE.value
    stride = x.stride(axis)
    return amax.numel(), stride, (ONE_AN_ELEMENT if stride % 8 else ONE_FOR_EIGHT).value


def _programs(size: int) -> int:
    return -(-size // (ROWS * 8))


def _launch(
    kernel: Any, size: int, pointers: tuple[Tensor | None, ...], numbers: tuple[int, ...], constants: tuple[Any, ...]
) -> None:
    if size:
        constants = (*constants, size >= 2**31 - ROWS * 8, ROWS)
        launch(kernel, _programs(size), pointers, (size,), numbers, constants, WARPS)
