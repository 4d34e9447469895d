"""Launching Triton kernels on a GPU in a few microseconds: a compiled kernel is found by a short key of our own.

Triton looks at every argument of every call to find the compiled kernel, which takes the host longer than these kernels
take the GPU. Here that happens once for each kind of call; what Triton compiles differently for (types, 16-byte
alignment, divisibility by 16) is in the key, and calls of another kind go the long way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
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
        pointers: tensors; the first is not None, and its device is where the kernel runs. Which of them are None
            must follow from the constants.
        sizes: numbers of elements.
        numbers: further integers, below 2**31 where the sizes are.
        constants: values of the constexpr parameters.
        warps: in a program.
    """
    like: Any = pointers[0]
    numbers = (*sizes, *numbers)
    addresses, types, joined = [], [], 0
    for pointer in pointers:
        if pointer is None:
            addresses.append(0)
        else:
            address = pointer.data_ptr()
            joined |= address
            addresses.append(address)
            types.append(pointer.dtype)
    usual = joined % 16 == 0
    divisible = []
    for size in sizes:
        usual = usual and 16 <= size < 2**30
        divisible.append(size % 16 == 0)
    key = (kernel, like.device, *types, *divisible, constants, warps)
    found = _compiled.get(key) if usual else None
    if found is not None:
        found(programs, addresses, numbers, constants)
        return
    with _on(like):
        made = kernel[(programs,)](*pointers, *numbers, *constants, num_warps=warps)
    if usual and made is not None:  # the interpreter compiles nothing
        _compiled[key] = _launcher(made, like)


def _launcher(compiled: Any, like: Tensor) -> Callable[..., None]:
    """A call of the compiled kernel's own launcher, with the arguments that Triton gives it."""
    function, packed, device = compiled.function, compiled.packed_metadata, like.device.index
    run, stream_of = compiled.run, triton.runtime.driver.active.get_current_stream
    alone = torch.cuda.device_count() == 1

    def go(programs: int, addresses: list[int], numbers: tuple[int, ...], constants: tuple[Any, ...]) -> None:
        stream = stream_of(device)
        if alone:
            run(programs, 1, 1, stream, function, packed, None, None, None, *addresses, *numbers, *constants)
        else:
            with _on(like):
                run(programs, 1, 1, stream, function, packed, None, None, None, *addresses, *numbers, *constants)

    return go


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of x."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
