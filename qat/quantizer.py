"""TensorQuantizer: the module that calibrates, fake-quantizes or passes a tensor through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qat.calib import Calibrator
from qat.compat import PytorchQuantizationNames, QuantizerMeta, translate_quantizer
from qat.descriptor import MIN_SCALE, QuantDescriptor
from qat.errors import CalibrationError, NotCalibratedError
from qat.fake_quant import compute_scale, fake_quantize
from qat.fake_quant_reuse import LastResult, shareable
from qat.fake_quant_weights import WeightCache
from qat.states import AmaxMode, QuantizerState

__all__ = [
    "AmaxMode",
    "QuantizerState",
    "StateDict",
    "TensorQuantizer",
    "name_quantizers",
    "named_quantizers",
    "set_quantizer_state",
]
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
StateDict = dict[str, Any]
"""What `state_dict()` gives and `load_state_dict()` takes."""


class TensorQuantizer(PytorchQuantizationNames, nn.Module, metaclass=QuantizerMeta):
    """Fake-quantizes one tensor by its QuantDescriptor.

    A new quantizer is QUANTIZING: without an amax its first forward is an error that names the layer, so that
    nothing runs in float unnoticed. amax is float32 whatever the type of the model, shape () per tensor or (C,)
    per channel, empty until calibrated; its state-dict key is `_amax`, the state's is `_state`.

    Args:
        descriptor: what quantizing this tensor means.
        name: the layer's name in messages; `qat.name_quantizers(model)` sets it for a whole model.
    """

    _amax: Tensor

    def __init__(self, descriptor: QuantDescriptor | None = None, name: str = "") -> None:
        super().__init__()
        self.descriptor = descriptor or QuantDescriptor()
        self.name = name
        self.state = QuantizerState.QUANTIZING
        self.amax_mode = AmaxMode.FROZEN
        self.momentum = 0.01
        self.step_max: Tensor | None = None
        self.reason = ""
        self.dead: list[int] = []
        self.calibrator: Calibrator | None = None
        self.weight_cache: WeightCache | None = None
        self.last_result: LastResult | None = None
        self.register_buffer("_amax", torch.empty(0))
        fixed = self.descriptor.amax
        if fixed is not None:
            self.amax = torch.tensor(fixed, dtype=torch.float32)
        if self.descriptor.learn_amax:
            self.set_amax_mode(AmaxMode.LEARNED)

    @property
    def calibrated(self) -> bool:
        """True once there is an amax."""
        return self._amax.numel() > 0

    @property
    def amax(self) -> Tensor | None:
        """Absolute maximum, float32, shape () or (C,), never negative; None before calibration."""
        if not self.calibrated:
            return None
        return self._amax.abs() if isinstance(self._amax, nn.Parameter) else self._amax

    @amax.setter
    def amax(self, value: Tensor | float) -> None:
        shape = () if self.descriptor.axis is None else (-1,)
        device = None if self._amax.is_meta else self._amax.device
        with torch.inference_mode(False):  # an inference tensor could not be saved for a backward pass later
            fresh = torch.as_tensor(value, dtype=torch.float32, device=device).detach().clone().reshape(shape)
        if not bool(torch.isfinite(fresh).all()) or bool((fresh < 0).any()):
            raise CalibrationError(
                f"amax of quantizer '{self.name}' has a negative or non-finite value. A scale must be positive: "
                "calibrate again, or set a positive amax."
            )
        if isinstance(self._amax, nn.Parameter):
            if self._amax.shape == fresh.shape:
                self._amax.data.copy_(fresh)
            else:
                self._amax = nn.Parameter(fresh)
        else:
            self._amax = fresh

    @property
    def scale(self) -> Tensor | None:
        """amax / max_bound, float32, at least MIN_SCALE; None before calibration."""
        amax = self.amax
        return None if amax is None else compute_scale(amax.detach(), self.descriptor.max_bound)

    @property
    def _state(self) -> Tensor:
        """The state as `state_dict` has it; torch.distributed.checkpoint looks every key up as an attribute."""
        return torch.tensor(self.state.value, dtype=torch.uint8)

    @property
    def fixed(self) -> bool:
        """True where the descriptor gives amax, so that calibration leaves it alone."""
        return self.descriptor.amax is not None

    def set_state(self, state: QuantizerState, reason: str = "") -> None:
        """Calibrate, quantize or pass through from now on; `reason` says why a tensor stays float."""
        self.state = state
        self.reason = reason if state is QuantizerState.PASSTHROUGH else ""
        if state is QuantizerState.CALIBRATING:
            _ = self._calibrator
            if self.last_result is not None:
                self.last_result.clear()

    def set_amax_mode(self, mode: AmaxMode | str) -> None:
        """Freeze amax, re-estimate it in each training step, or learn it as a parameter.

        Re-estimation is a moving average of the batch maximum for activations (Jacob et al. 2018) and the
        current maximum for weights. The average moves with every call; in `qat.training.fine_tune` once an optimizer
        step, by the maximum over all calls and ranks. To learn, call this before the optimizer is built; an optimizer
        may carry the parameter below zero, its magnitude is amax everywhere.
        """
        mode = AmaxMode(mode)
        self.amax_mode = mode
        value = self._amax.detach()
        if isinstance(self._amax, nn.Parameter):
            value = value.abs()
        del self._amax
        if mode is AmaxMode.LEARNED:
            self._amax = nn.Parameter(value)
        else:
            self.register_buffer("_amax", value)

    def load_calib_amax(self, method: str | None = None, *, strict: bool = False, **options: Any) -> bool:
        """Take amax from the calibrator's statistics; the statistics stay, so another method can follow.

        Args:
            method: of the calibrator's `methods`; None for its default.
            strict: raise where no tensor was collected.
            **options: the method's, such as `percentile`.

        Returns:
            False, and amax as it was, where no tensor was collected.

        Raises:
            CalibrationError: NaN or Inf was collected; the message names this quantizer and the batch.
        """
        if self.fixed:
            return True
        try:
            amax = None if self.calibrator is None else self.calibrator.compute_amax(method, **options)
        except CalibrationError as error:
            raise CalibrationError(f"quantizer '{self.name}': {error}") from error
        if amax is None:
            if strict:
                raise CalibrationError(
                    f"quantizer '{self.name}' has seen no tensor. Run the model while it calibrates."
                )
            return False
        floor = self.descriptor.max_bound * MIN_SCALE
        self.dead = (amax.reshape(-1) < floor).nonzero().flatten().tolist()
        self.amax = amax.clamp_min(floor)
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Tensor like x: fake-quantized, or x itself while calibrating or passing through.

        Raises:
            NotCalibratedError: asked to quantize without an amax.
        """
        if self.state is QuantizerState.PASSTHROUGH:
            return x
        if self.state is QuantizerState.CALIBRATING:
            if self.calibrator is not None and not (self.last_result is not None and self.last_result.again(x)):
                self.calibrator.collect(x if isinstance(x, nn.Parameter) else x.detach())
            return x
        amax = self._amax
        if not amax.numel():
            raise NotCalibratedError(
                f"quantizer '{self.name or 'without a name'}' is not calibrated. Run qat.calibrate(model, batches) or "
                "load a calibrated checkpoint first, or leave the layer float."
            )
        if self.amax_mode is AmaxMode.REESTIMATED and self.training:
            if not self.fixed:
                self._reestimate(x.detach(), self.descriptor.narrow_range or isinstance(x, nn.Parameter))
            return self._fake_quantize(x, amax)
        y = None if torch.compiler.is_compiling() else self._from_others(x, amax)
        return self._fake_quantize(x, amax) if y is None else y

    def _fake_quantize(self, x: Tensor, amax: Tensor) -> Tensor:
        d = self.descriptor
        if self.amax_mode is AmaxMode.LEARNED:
            amax = amax.abs()
        elif self.amax_mode is AmaxMode.REESTIMATED and self.training:
            # A shared quantizer moves again before the backward pass, which needs the value of this call.
            amax = amax.clone()
        return fake_quantize(x, amax, d.axis, d.min_bound, d.max_bound)

    def _from_others(self, x: Tensor, amax: Tensor) -> Tensor | None:
        """A weight together with the model's others, a tensor that another reader had a moment ago from memory."""
        d, last, kind = self.descriptor, self.last_result, type(x)
        if kind is nn.Parameter:
            cache = self.weight_cache
            return None if cache is None else cache.get(self, x, amax, d.axis, (d.min_bound, d.max_bound))
        if last is None or kind is not Tensor or self.amax_mode is AmaxMode.LEARNED or not shareable(x):
            return None
        y = last.get(x, amax, d)
        if y is None:
            y = self._fake_quantize(x, amax)
            last.put(x, amax, d, y)
        return y

    @torch.no_grad()
    def _reestimate(self, x: Tensor, weight: bool) -> None:
        d = self.descriptor
        if not x.numel() or _graph_task() != -1:  # a backward pass runs a checkpointed forward again
            return
        others = [i for i in range(x.dim()) if d.axis is None or i != d.axis % x.dim()]
        largest = (x.abs().amax(others) if others else x.abs()).float()
        largest = torch.where(largest.isfinite(), largest, self._amax if self.step_max is None else self.step_max)
        if weight or d.axis is not None:
            self._amax.copy_(largest)
        elif self.step_max is None:
            self._amax.lerp_(largest, self.momentum)
        else:
            self.step_max.copy_(torch.maximum(self.step_max, largest))

    def extra_repr(self) -> str:
        """Descriptor, state and range of amax, for print(model)."""
        found = self.amax
        if found is None:
            amax = "not calibrated"
        elif found.numel() == 1:
            amax = f"amax={found.item():.4g}"
        else:
            amax = f"amax=[{found.min().item():.4g}, {found.max().item():.4g}]({found.numel()})"
        return f"{self.descriptor.num_bits} bit, axis={self.descriptor.axis}, {self.state.name.lower()}, {amax}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TensorQuantizer:
        amax = self._amax.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._amax.dtype != torch.float32:
            value = amax.to(self._amax.device)
            self._amax = nn.Parameter(value) if isinstance(self._amax, nn.Parameter) else value
        return self

    def _save_to_state_dict(self, destination: StateDict, prefix: str, keep_vars: bool) -> None:
        if isinstance(self._amax, nn.Parameter):
            self._amax.data.abs_()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "_state"] = self._state

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: Any) -> None:
        translate_quantizer(state_dict, prefix, self.descriptor)
        amax = state_dict.get(prefix + "_amax")
        state = state_dict.pop(prefix + "_state", None)
        if amax is not None and amax.numel():
            self.name = self.name or prefix.rstrip(".")
            self.amax = amax
        if amax is not None or not self.calibrated:
            # A float checkpoint has no amax: an uncalibrated quantizer stays so, and says it when it is run.
            state_dict[prefix + "_amax"] = self._amax.detach()
        if state is not None:
            self.set_state(QuantizerState(int(state)), self.reason)
        elif amax is not None:
            self.set_state(QuantizerState.QUANTIZING)
        super()._load_from_state_dict(state_dict, prefix, *args)


def named_quantizers(model: nn.Module) -> Iterator[tuple[str, TensorQuantizer]]:
    """Every TensorQuantizer of the model once, with its module name, in module order."""
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            yield name, module


def name_quantizers(model: nn.Module) -> None:
    """Give each quantizer its module name, so that errors and summaries name the layer, and all one weight cache."""
    cache = WeightCache()
    for name, quantizer in named_quantizers(model):
        quantizer.name = name
        quantizer.weight_cache = cache


def set_quantizer_state(model: nn.Module, state: QuantizerState) -> None:
    """Put every quantizer in `state`, except those left float with a reason."""
    for _, quantizer in named_quantizers(model):
        if not (quantizer.state is QuantizerState.PASSTHROUGH and quantizer.reason):
            quantizer.set_state(state)
