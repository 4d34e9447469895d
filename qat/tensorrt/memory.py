"""Memory for an engine's tensors: device buffers, pinned host buffers, and TensorRT's output allocator.

Never run with TensorRT itself: no GPU that the library supports was at hand. Run on an NVIDIA H200 with a stand-in
for the engine (tests/tensorrt/test_engine_runner.py); the calls were checked against the bindings of tensorrt 10.16
and 11.4 and of tensorrt_rtx 1.7 (tests/tensorrt/test_api_presence.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat.errors import EngineError
from qat.runtime.runner import Array
from qat.tensorrt.api import Library

_TORCH_TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


def torch_type(name: str, dtype: Any) -> torch.dtype:
    """The torch type of an engine's tensor.

    Raises:
        EngineError: a type that cannot cross to the host, such as FP8.
    """
    if dtype.name not in _TORCH_TYPES:
        raise EngineError(f"Tensor '{name}' has type {dtype.name}; inputs and outputs must be {list(_TORCH_TYPES)}.")
    return _TORCH_TYPES[dtype.name]


def numpy_type(dtype: torch.dtype) -> str:
    """NumPy type that stands for a torch type on the host; bfloat16, which NumPy lacks, becomes float32."""
    return "float32" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")


class TensorBuffer:
    """One tensor of an engine: device memory that only grows, and pinned host memory of the same size.

    Args:
        name: the tensor.
        dtype: its type.
        on_host: for shape tensors, which TensorRT reads from host memory; there is no device copy then.
    """

    def __init__(self, name: str, dtype: torch.dtype, on_host: bool = False) -> None:
        self.name = name
        self.dtype = dtype
        self.on_host = on_host
        self.shape: tuple[int, ...] = ()
        self._host = torch.empty(0, dtype=dtype)
        self._device = torch.empty(0, dtype=dtype)

    def resize(self, shape: tuple[int, ...]) -> None:
        """Make room for `shape`; the address may change, never while work that uses it is in flight."""
        self.shape = shape
        # TensorRT wants a valid address for empty tensors too.
        count = max(int(np.prod(shape)), 1)
        if self._host.numel() < count:
            self._host = torch.empty(count, dtype=self.dtype, pin_memory=True)
            if not self.on_host:
                self._device = torch.empty(count, dtype=self.dtype, device="cuda")

    @property
    def address(self) -> int:
        """What TensorRT reads or writes."""
        return self._host.data_ptr() if self.on_host else self._device.data_ptr()

    def _view(self, memory: Tensor) -> Tensor:
        return memory[: int(np.prod(self.shape))].view(self.shape)

    def fill(self, array: Array) -> None:
        """Copy into pinned memory; the array may be reused at once."""
        target = self._view(self._host)
        if self.dtype == torch.bfloat16:
            target.copy_(torch.from_numpy(np.array(array)))
        else:
            np.copyto(target.numpy(), array)

    def upload(self) -> None:
        """Start the copy to the device on the current stream."""
        if not self.on_host:
            self._view(self._device).copy_(self._view(self._host), non_blocking=True)

    def download(self) -> None:
        """Start the copy to pinned memory on the current stream."""
        if not self.on_host:
            self._view(self._host).copy_(self._view(self._device), non_blocking=True)

    def array(self) -> Array:
        """A copy of the pinned memory; call after the stream is synchronized."""
        values = self._view(self._host)
        values = values.float() if self.dtype == torch.bfloat16 else values
        return np.array(values.numpy(), copy=True)


class DynamicOutput:
    """An output whose shape depends on data: TensorRT asks for memory while it runs, and reports the shape after."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.shape: tuple[int, ...] = ()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> int:
        """Device address with room for `size` bytes."""
        if self._memory.numel() < max(size, 1):
            self._memory = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        return self._memory.data_ptr()

    def array(self) -> Array:
        """The output after execution, copied to the host; this copy waits for the stream that ran."""
        count = int(np.prod(self.shape))
        values = self._memory[: count * self.dtype.itemsize].view(self.dtype).view(self.shape).cpu()
        return np.array((values.float() if self.dtype == torch.bfloat16 else values).numpy(), copy=True)


def make_output_allocator(library: Library, output: DynamicOutput) -> Any:
    """An IOutputAllocator that hands out `output`'s memory; the caller keeps it alive."""
    trt: Any = library.trt

    class _Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return output.reserve(size)

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return output.reserve(size)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            output.shape = tuple(shape)

    return _Allocator()
