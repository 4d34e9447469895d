"""QuantDescriptor: what quantizing one tensor means."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import yaml

from qat.errors import DescriptorError

MIN_SCALE = 2.0**-24
"""The smallest scale ever used or exported: the smallest positive float16, so it survives an FP16 engine."""


@dataclass(frozen=True)
class QuantDescriptor:
    """How one tensor is quantized: symmetric, signed, zero-point 0, `scale = amax / max_bound`.

    The integer grid follows TensorRT's explicit quantization: signed INT8 only. Names follow
    pytorch-quantization's `QuantDescriptor`.

    Attributes:
        num_bits: width of the integer, 2 to 8. Only 8 can be exported for TensorRT.
        axis: dimension with one scale per index (per-channel), or None for one scale (per-tensor).
        narrow_range: True clamps to [-127, 127] (weights), False to [-128, 127] (activations).
        unsigned: must be False; kept so that a request for it is refused with the reason.
        calib_method: calibrator that collects statistics: "max", "histogram" or a registered name.
        amax: fixed absolute maximum, one number or one per channel; None lets calibration find it.
        learn_amax: True makes amax a trainable parameter (LSQ, Esser et al. 2020).

    Raises:
        DescriptorError: a field or a combination is invalid; the message names field, value and fix.
    """

    num_bits: int = 8
    axis: int | None = None
    narrow_range: bool = False
    unsigned: bool = False
    calib_method: str = "max"
    amax: float | tuple[float, ...] | None = None
    learn_amax: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        if self.unsigned:
            raise DescriptorError(
                "unsigned=True is refused: TensorRT reads UINT8 as INT8, so the engine would compute other "
                "numbers than torch. Use unsigned=False (signed symmetric), also after ReLU."
            )
        if not 2 <= self.num_bits <= 8:
            raise DescriptorError(f"num_bits={self.num_bits} is outside 2..8. Use num_bits=8 for TensorRT INT8.")
        if self.axis is not None and self.calib_method != "max":
            raise DescriptorError(
                f"axis={self.axis} with calib_method={self.calib_method!r}: only 'max' calibrates per channel. "
                "Use calib_method='max', or axis=None for one scale per tensor."
            )
        self._check_amax()
        _ = (
            self.min_bound
        )  # known from the start: before Python 3.12 a cached_property takes a lock, which torch.compile cannot

    def _check_types(self) -> None:
        for name in ("narrow_range", "unsigned", "learn_amax"):
            if not isinstance(getattr(self, name), bool):
                raise DescriptorError(f"{name}={getattr(self, name)!r} is not a boolean. Use True or False.")
        if not isinstance(self.num_bits, int) or isinstance(self.num_bits, bool):
            raise DescriptorError(f"num_bits={self.num_bits!r} is not an integer. Use num_bits=8 for TensorRT INT8.")
        if self.axis is not None and (not isinstance(self.axis, int) or isinstance(self.axis, bool)):
            raise DescriptorError(
                f"axis={self.axis!r} is neither an integer nor None. Use one dimension (0 for Conv and Linear "
                "weights), or None for one scale per tensor."
            )
        if not isinstance(self.calib_method, str) or not self.calib_method:
            raise DescriptorError(f"calib_method={self.calib_method!r} is not a name. Use 'max' or 'histogram'.")

    def _check_amax(self) -> None:
        if self.amax is None:
            return
        if isinstance(self.amax, list):
            object.__setattr__(self, "amax", tuple(self.amax))
        values = self.amax if isinstance(self.amax, tuple) else (self.amax,)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DescriptorError(f"amax={self.amax!r} holds {value!r}, which is not a number. Use floats.")
            if not math.isfinite(value) or value <= 0:
                raise DescriptorError(
                    f"amax={self.amax!r} holds {value}, and a scale must be positive and finite. "
                    "Use a positive number, or amax=None to calibrate."
                )
        if isinstance(self.amax, tuple) and self.axis is None:
            raise DescriptorError(f"amax has {len(values)} values but axis is None. Give one number, or set the axis.")

    @cached_property
    def max_bound(self) -> int:
        """Largest integer code, 127 for 8 bits."""
        return int(2 ** (self.num_bits - 1) - 1)

    @cached_property
    def min_bound(self) -> int:
        """Smallest integer code: -127 with narrow_range, else -128, for 8 bits."""
        return -self.max_bound if self.narrow_range else -self.max_bound - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of every field (a tuple amax as a list), the inverse of `from_dict`."""
        values = asdict(self)
        if isinstance(self.amax, tuple):
            values["amax"] = list(self.amax)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantDescriptor:
        """Descriptor from a mapping; an unknown key is a DescriptorError with the nearest known name."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known fields: {', '.join(known)}."
                raise DescriptorError(f"unknown field {key!r} in a QuantDescriptor. {hint}")
        return cls(**values)

    def to_yaml(self) -> str:
        """YAML text of `to_dict`."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def from_yaml(cls, text: str) -> QuantDescriptor:
        """Descriptor from YAML text; text that is not YAML, or not a mapping, is a DescriptorError."""
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise DescriptorError(f"a QuantDescriptor cannot be read from this text: {error}") from error
        if not isinstance(values, Mapping):
            raise DescriptorError(
                f"a QuantDescriptor in YAML must be a mapping of fields, not {type(values).__name__}."
            )
        return cls.from_dict(values)


QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor()
"""Activations: one scale, codes -128..127."""
QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL = QuantDescriptor(axis=0, narrow_range=True)
"""Weights of Conv and Linear: one scale per output channel, codes -127..127."""
QUANT_DESC_8BIT_WEIGHT_PER_TENSOR = QuantDescriptor(narrow_range=True)
"""Weights with one scale; the default for ConvTranspose, whose per-channel form TensorRT runs in float."""
