"""Launching Triton kernels on a GPU in a few microseconds: a compiled kernel is found by a short key of our own.

Triton looks at every argument of every call to find the compiled kernel, which takes the host longer than these kernels
take the GPU. Here that happens once for each kind of call; what Triton compiles differently for (types, 16-byte
alignment, divisibility by 16) is in the key, and calls of another kind go the long way.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int,
) -> None:
    """Run a kernel whose parameters are the pointers, the sizes, the numbers and the constants, in this order.

    Args:
        kernel: a `triton.jit` function that does not specialize on `numbers`.
        programs: length of the grid.
        pointers: tensors; the first is not None, and its device is where the kernel runs.
        sizes: numbers of elements.
        numbers: further integers, below 2**31 where the sizes are.
        constants: values of the constexpr parameters.
        warps: in a program.
    """
    like: Any = pointers[0]
    with on_device_of(like):
        addresses = [0 if p is None else p.data_ptr() for p in pointers]
        joined = 0
        for address in addresses:
            joined |= address
        numbers = (*sizes, *numbers)
        if joined % 16 or any(not 16 <= size < 2**30 for size in sizes):
            kernel[(programs,)](*pointers, *numbers, *constants, num_warps=warps)
            return
        types = tuple([None if p is None else p.dtype for p in pointers])
        key = (kernel, like.device, types, tuple([size % 16 == 0 for size in sizes]), constants, warps)
        found = _compiled.get(key)
        if found is None:
            made = kernel[(programs,)](*pointers, *numbers, *constants, num_warps=warps)
            if made is not None:  # the interpreter compiles nothing
                _compiled[key] = made
        else:
            found[(programs, 1, 1)](*addresses, *numbers, *constants)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of x."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
