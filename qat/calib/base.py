"""What a calibrator is, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from qat.errors import DescriptorError


@runtime_checkable
class Calibrator(Protocol):
    """Collects statistics of the tensors it is shown and turns them into an amax.

    `collect` runs once per batch on the tensor's device and must not wait for the GPU. `compute_amax` runs once
    at the end; where torch.distributed is initialised, it first combines the statistics of all ranks.

    Attributes:
        methods: names that `compute_amax(method=...)` takes; empty for a calibrator with one way only.
    """

    methods: tuple[str, ...]

    def collect(self, x: Tensor) -> None:
        """Add one tensor's statistics."""

    def compute_amax(self, method: str | None = None, **options: Any) -> Tensor | None:
        """Absolute maximum, float32: shape () per tensor, (C,) per channel; None where nothing was collected."""

    def reset(self) -> None:
        """Forget everything collected."""


CalibratorFactory = Callable[[int, int | None, bool], Calibrator]
"""Called as `factory(num_bits, axis, narrow_range)`."""

_REGISTRY: dict[str, CalibratorFactory] = {}


def register_calibrator(name: str, factory: CalibratorFactory) -> None:
    """Make `calib_method=name` in a QuantDescriptor build `factory(num_bits, axis, narrow_range)`.

    Raises:
        DescriptorError: the name is taken by another factory.
    """
    if _REGISTRY.get(name, factory) is not factory:
        raise DescriptorError(f"a calibrator named {name!r} is registered already. Choose another name.")
    _REGISTRY[name] = factory


def make_calibrator(name: str, num_bits: int, axis: int | None, narrow_range: bool) -> Calibrator:
    """Build the calibrator registered under `name`; an unknown name is a DescriptorError that lists the known."""
    if name not in _REGISTRY:
        known = ", ".join(sorted(_REGISTRY))
        raise DescriptorError(f"calib_method={name!r} is not a calibrator. Known: {known}. Or register_calibrator().")
    return _REGISTRY[name](num_bits, axis, narrow_range)
