"""pytorch-quantization's names on our TensorQuantizer, and what its checkpoints hold that ours do not.

docs/from_pytorch_quantization.md lists every name.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from qat.calib import Calibrator, make_calibrator
from qat.descriptor import QuantDescriptor
from qat.errors import CalibrationError
from qat.states import QuantizerState

DISABLED = "disable() was called"


class QuantizerMeta(type):
    """Gives the class TensorQuantizer the flag `use_fb_fake_quant`, which there chose how a file is exported."""

    _use_fb_fake_quant = False

    @property
    def use_fb_fake_quant(cls) -> bool:
        """What it was set to; it changes nothing."""
        return cls._use_fb_fake_quant

    @use_fb_fake_quant.setter
    def use_fb_fake_quant(cls, value: bool) -> None:
        if value:
            warnings.warn(
                "TensorQuantizer.use_fb_fake_quant changes nothing here: qat.export writes QuantizeLinear and "
                "DequantizeLinear always. Replace torch.onnx.export(model, ...) by qat.export(model, example_inputs, "
                "path) and drop this line.",
                stacklevel=2,
            )
        QuantizerMeta._use_fb_fake_quant = bool(value)


class PytorchQuantizationNames:
    """The methods and properties by which scripts for pytorch-quantization switch a TensorQuantizer.

    There are three flags there and one state here: a quantizer that calibrates passes its tensor through, and one that
    `disable()` left float stays so until `enable()`.
    """

    descriptor: QuantDescriptor
    state: QuantizerState
    reason: str
    calibrator: Calibrator | None
    amax: Any
    fixed: Any

    def set_state(self, state: QuantizerState, reason: str = "") -> None:
        """As in TensorQuantizer."""
        raise NotImplementedError

    def disable(self) -> None:
        """Pass through, whatever is enabled, until `enable()`."""
        self.set_state(QuantizerState.PASSTHROUGH, DISABLED)

    def enable(self) -> None:
        """Quantize."""
        self.set_state(QuantizerState.QUANTIZING)

    def enable_quant(self) -> None:
        """Quantize, unless it was left float."""
        if not self.reason:
            self.set_state(QuantizerState.QUANTIZING)

    def disable_quant(self) -> None:
        """Pass through if it quantizes."""
        if self.state is QuantizerState.QUANTIZING:
            self.set_state(QuantizerState.PASSTHROUGH)

    def enable_calib(self) -> None:
        """Collect statistics and pass through, unless it was left float."""
        if not self.reason:
            self.set_state(QuantizerState.CALIBRATING)

    def disable_calib(self) -> None:
        """Quantize if it calibrates: nothing runs in float unnoticed."""
        if self.state is QuantizerState.CALIBRATING:
            self.set_state(QuantizerState.QUANTIZING)

    @property
    def _calibrator(self) -> Calibrator | None:
        """The calibrator, made now if need be; None where the descriptor fixes amax."""
        if self.calibrator is None and not self.fixed:
            d = self.descriptor
            self.calibrator = make_calibrator(d.calib_method, d.num_bits, d.axis, d.narrow_range)
        return self.calibrator

    @property
    def num_bits(self) -> int:
        """Width of the integer."""
        return self.descriptor.num_bits

    @property
    def maxbound(self) -> int:
        """Largest integer code."""
        return self.descriptor.max_bound

    @property
    def axis(self) -> int | None:
        """Dimension with one scale per index, None for one scale."""
        return self.descriptor.axis

    @property
    def unsigned(self) -> bool:
        """False: TensorRT has signed INT8 only."""
        return self.descriptor.unsigned

    @property
    def narrow_range(self) -> bool:
        """Whether the smallest code is the negative of the largest."""
        return self.descriptor.narrow_range

    @property
    def fake_quant(self) -> bool:
        """True: integers themselves are never returned."""
        return True

    @property
    def step_size(self) -> Tensor | None:
        """amax / maxbound, float32; None before calibration. Beside `scale` it has no lower limit."""
        amax: Tensor | None = self.amax
        return None if amax is None else amax / self.descriptor.max_bound


def translate_quantizer(state_dict: dict[str, Any], prefix: str, descriptor: QuantDescriptor) -> None:
    """Rewrite one quantizer's entries of a state dict from pytorch-quantization to ours, in place.

    Raises:
        CalibrationError: the entries mean something that this quantizer cannot compute.
    """
    if prefix + "_pre_quant_scale" in state_dict:
        raise CalibrationError(
            f"checkpoint key '{prefix}_pre_quant_scale' scales the channels before quantization, which no Q/DQ node "
            "does. Multiply it into the layer before and divide the weight by it, then calibrate again."
        )
    bounds = [state_dict.pop(f"{prefix}clip.clip_value_{end}", None) for end in ("min", "max")]
    if isinstance(bounds[0], Tensor) and isinstance(bounds[1], Tensor):
        state_dict[prefix + "_amax"] = _learned_amax(-bounds[0].detach(), bounds[1].detach(), prefix)
    amax = state_dict.get(prefix + "_amax")
    if isinstance(amax, Tensor) and amax.numel() > 1:
        _check_axis(amax, prefix, descriptor)


def _learned_amax(lower: Tensor, upper: Tensor, prefix: str) -> Tensor:
    if not torch.equal(lower, upper):
        warnings.warn(
            f"'{prefix.rstrip('.')}' learned the bounds -{lower.item():g} and {upper.item():g}: TensorRT quantizes "
            "symmetrically, so the larger one is taken and values beyond the smaller one are no longer clipped. Where "
            "the tensor reaches it, numbers differ: evaluate the model, and fine-tune if it lost accuracy.",
            stacklevel=2,
        )
    return torch.maximum(lower, upper)


def _check_axis(amax: Tensor, prefix: str, descriptor: QuantDescriptor) -> None:
    """The dimensions that pytorch-quantization keeps in an amax tell its axis."""
    axes = [dim for dim, size in enumerate(amax.shape) if size > 1]
    if len(axes) > 1:
        raise CalibrationError(
            f"checkpoint key '{prefix}_amax' has shape {tuple(amax.shape)}: scales along several dimensions are "
            "nothing that TensorRT runs. Calibrate again with one axis."
        )
    if descriptor.axis is None:
        axis = f"axis={axes[0]}" if amax.dim() > 1 else "axis"
        raise CalibrationError(
            f"checkpoint key '{prefix}_amax' has {amax.numel()} values but this quantizer is per-tensor. Build the "
            f"model with the descriptor ({axis}) that the checkpoint was made with, for instance through "
            "set_default_quant_desc_weight; or, for a transposed convolution, which TensorRT runs in float with such "
            "scales, leave this key out and calibrate again."
        )
    if amax.dim() > 1 and descriptor.axis % amax.dim() != axes[0]:
        raise CalibrationError(
            f"checkpoint key '{prefix}_amax' of shape {tuple(amax.shape)} was calibrated along dimension {axes[0]} but "
            f"this quantizer has axis={descriptor.axis}. Build the model with axis={axes[0]}."
        )
