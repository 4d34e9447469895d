"""Which calls share a compiled kernel. The kernel is a double: Triton's own compiles on a GPU only."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch only")

from qat import triton_launch
from qat.triton_launch import launch


class Compiled:
    """What Triton returns from the first call of a kind."""

    function, packed_metadata = "function", "packed"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        """The launcher: grid, stream, function, metadata, two hooks, the kernel's arguments."""
        assert arguments[4:9] == ("function", "packed", None, None, None)
        self.calls.append((arguments[:3], *arguments[9:]))


class Kernel:
    """A jitted function: every call through it is one that Triton has to look at."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, num_warps: int) -> Compiled:
            self.calls.append((grid, *arguments, num_warps))
            self.made.append(Compiled())
            return self.made[-1]

        return call


def aligned(size: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    """A tensor whose address is `offset` elements after a multiple of 16 bytes."""
    base = torch.zeros(size + 64, dtype=dtype)
    skip = (-base.data_ptr() % 16) // base.element_size() + offset
    return base[skip : skip + size]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton_launch, "_compiled", {})
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: "stream"))
    monkeypatch.setattr(triton_launch.triton.runtime, "driver", driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return Kernel()


def test_second_call_of_a_kind_goes_to_the_compiled_kernel_with_addresses(kernel: Kernel) -> None:
    x, y = aligned(64), aligned(32)
    launch(kernel, 3, (x, None), (64,), (5,), (True, -128), 8)
    launch(kernel, 2, (y, None), (32,), (7,), (True, -128), 8)
    assert kernel.calls == [((3,), x, None, 64, 5, True, -128, 8)]
    assert kernel.made[0].calls == [((2, 1, 1), y.data_ptr(), 0, 32, 7, True, -128)]


@pytest.mark.parametrize(
    ("pointers", "size", "constants", "warps"),
    [
        ((aligned(64, torch.float16), None), 64, (True,), 8),
        ((aligned(64), aligned(64)), 64, (True,), 8),
        ((aligned(64), None), 63, (True,), 8),
        ((aligned(64), None), 64, (False,), 8),
        ((aligned(64), None), 64, (True,), 4),
    ],
    ids=["type", "None or not", "divisibility", "constants", "warps"],
)
def test_what_triton_compiles_differently_for_is_another_kind(
    kernel: Kernel, pointers: tuple[Any, ...], size: int, constants: tuple[Any, ...], warps: int
) -> None:
    launch(kernel, 1, (aligned(64), None), (64,), (), (True,), 8)
    launch(kernel, 1, pointers, (size,), (), constants, warps)
    launch(kernel, 1, pointers, (size,), (), constants, warps)
    assert len(kernel.calls) == 2
    assert kernel.made[0].calls == [] and len(kernel.made[1].calls) == 1


@pytest.mark.parametrize(
    ("x", "size"),
    [(aligned(64, offset=1), 64), (aligned(64), 15), (aligned(64), 1), (aligned(64), 2**31)],
    ids=["alignment", "small", "one", "64-bit"],
)
def test_calls_that_are_not_of_the_usual_kind_always_go_through_triton(kernel: Kernel, x: Tensor, size: int) -> None:
    launch(kernel, 1, (aligned(64),), (64,), (), (), 8)
    for _ in range(2):
        launch(kernel, 1, (x,), (size,), (), (), 8)
    assert len(kernel.calls) == 3 and all(made.calls == [] for made in kernel.made)
