"""What every quant module shares: descriptors, quantizers, and the in-place conversion of a float module."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from qat.descriptor import QUANT_DESC_8BIT_PER_TENSOR, QuantDescriptor
from qat.errors import DescriptorError
from qat.nn.obstacles import find_obstacle
from qat.quantizer import TensorQuantizer


class QuantMixin(nn.Module):
    """Placed before a torch.nn class, it fake-quantizes that class's input, and its weight where there is one.

    The torch class stays a base, so isinstance holds and weights keep their state-dict keys; quantizers add
    `_input_quantizer._amax` and, with a weight, `_weight_quantizer._amax`. Biases stay float.

    Args:
        *args: what the torch class takes.
        quant_desc_input: descriptor of the input; None takes `default_quant_desc_input` of the class.
        quant_desc_weight: descriptor of the weight; None takes `default_quant_desc_weight` of the class.
        **kwargs: what the torch class takes.

    Raises:
        TypeError: a keyword that neither this class nor the torch class has.
        DescriptorError: a descriptor that is not a QuantDescriptor, or one for a weight the class does not have.
    """

    default_quant_desc_input: ClassVar[QuantDescriptor] = QUANT_DESC_8BIT_PER_TENSOR
    default_quant_desc_weight: ClassVar[QuantDescriptor | None] = None
    int8_weight_axes: ClassVar[tuple[int, ...]] = (0,)
    """Weight axes whose per-channel scales TensorRT runs in INT8; per-tensor always does."""

    _input_quantizer: TensorQuantizer
    _weight_quantizer: TensorQuantizer

    def __init__(
        self,
        *args: Any,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
        **kwargs: Any,
    ) -> None:
        for key in kwargs:
            if key.startswith("quant_"):
                raise TypeError(
                    f"{type(self).__name__} has no keyword {key!r}. Its quantization keywords are quant_desc_input "
                    "and quant_desc_weight."
                )
        super().__init__(*args, **kwargs)
        for name, quantizer in self._make_quantizers(self, quant_desc_input, quant_desc_weight).items():
            self.add_module(name, quantizer)

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """Quantizer of the input."""
        return self._input_quantizer

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        """Quantizer of the weight; AttributeError where the class has no weight."""
        return self._weight_quantizer

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would register a module under the property's name, where no forward would ever use it.
        if name in ("input_quantizer", "weight_quantizer"):
            raise AttributeError(f"{name} of {type(self).__name__} is read-only. Assign to _{name} instead.")
        super().__setattr__(name, value)

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Descriptor of the input of instances made or converted from now on, subclasses included."""
        cls.default_quant_desc_input = cls._checked("input", value)

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Descriptor of the weight of instances made or converted from now on, subclasses included."""
        cls.default_quant_desc_weight = cls._checked("weight", value)

    @classmethod
    def convert_(
        cls,
        module: nn.Module,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make a float module an instance of this class, in place: its parameters, hooks and identity stay.

        A subclass of the torch class that computes nothing of its own becomes a subclass of both.

        Args:
            module: instance of this class's torch class.
            quant_desc_input: descriptor of the input; None takes the class default.
            quant_desc_weight: descriptor of the weight; None takes the class default. A class without weight
                has no use for it.
            device: where the quantizers live; None takes the device of the module's own tensors.

        Returns:
            The same object.

        Raises:
            TypeError: the module is of another class, or `conversion_obstacle` has a reason against it.
            DescriptorError: a descriptor that is not a QuantDescriptor.
        """
        base = cls._float_class()
        if not isinstance(module, base):
            raise TypeError(
                f"{cls.__name__}.convert_ takes an instance of {base.__name__}, not {type(module).__name__}. "
                "Find the right class with qat.nn.quant_class_for(module)."
            )
        obstacle = find_obstacle(module, base)
        if obstacle is not None:
            raise TypeError(f"{type(module).__name__} cannot become {cls.__name__}: {obstacle}.")
        if cls.default_quant_desc_weight is None:
            quant_desc_weight = None
        quantizers = cls._make_quantizers(module, quant_desc_input, quant_desc_weight, device)
        module.__class__ = cls if type(module) is base else _combined_class(cls, type(module))
        for name, quantizer in quantizers.items():
            module.add_module(name, quantizer)
        assert isinstance(module, cls)
        return module

    @classmethod
    def _float_class(cls) -> type[nn.Module]:
        return next(c for c in cls.__mro__ if issubclass(c, nn.Module) and not issubclass(c, QuantMixin))

    @classmethod
    def _quantizer_names(cls, module: nn.Module) -> tuple[list[str], list[str]]:
        """Names of the quantizers of inputs, and of weights, for a module of this class's torch class."""
        return ["_input_quantizer"], [] if cls.default_quant_desc_weight is None else ["_weight_quantizer"]

    @classmethod
    def _make_quantizers(
        cls,
        module: nn.Module,
        quant_desc_input: QuantDescriptor | None,
        quant_desc_weight: QuantDescriptor | None,
        device: torch.device | str | None = None,
    ) -> dict[str, TensorQuantizer]:
        inputs, weights = cls._quantizer_names(module)
        desc = cls.default_quant_desc_input if quant_desc_input is None else cls._checked("input", quant_desc_input)
        made = {name: TensorQuantizer(desc) for name in inputs}
        tensor = next(chain(module.parameters(recurse=False), module.buffers(recurse=False)), None)
        if quant_desc_weight is not None:
            cls._checked("weight", quant_desc_weight)
        weight_desc = quant_desc_weight or cls.default_quant_desc_weight
        if weight_desc is not None:
            made |= {name: TensorQuantizer(weight_desc) for name in weights}
            if tensor is not None:
                cls._warn_of_float_axis(weight_desc, tensor.dim())
        if device is None and tensor is not None:
            device = tensor.device
        for quantizer in made.values():
            quantizer.to(device).train(module.training)
        return made

    @classmethod
    def _checked(cls, which: str, value: QuantDescriptor) -> QuantDescriptor:
        if not isinstance(value, QuantDescriptor):
            raise DescriptorError(
                f"quant_desc_{which} of {cls.__name__} is {value!r}, not a QuantDescriptor. Pass "
                "qat.QuantDescriptor(...), or None for the default."
            )
        if which == "weight" and cls.default_quant_desc_weight is None:
            raise DescriptorError(f"{cls.__name__} quantizes no weight, so quant_desc_weight must be left out.")
        return value

    @classmethod
    def _warn_of_float_axis(cls, desc: QuantDescriptor, dims: int) -> None:
        if desc.axis is None or desc.axis % dims in cls.int8_weight_axes:
            return
        better = f"axis={cls.int8_weight_axes[0]} or axis=None" if cls.int8_weight_axes else "axis=None (per-tensor)"
        warnings.warn(
            f"{cls.__name__} with per-channel weight scales on axis={desc.axis}: TensorRT accepts the file and runs "
            f"the layer in float. Use {better} for INT8.",
            stacklevel=4,
        )

    def forward(self, input: Tensor) -> Any:
        """What the torch class computes, on the fake-quantized input."""
        return super().forward(self._input_quantizer(input))


_combined: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _combined_class(quant_class: type[nn.Module], float_class: type[nn.Module]) -> type[nn.Module]:
    """Class of converted instances of `float_class`, a subclass of the torch class with no forward of its own.

    It has no importable name, so its instances pickle as the two classes it is made of.
    """

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _new_combined, (quant_class, float_class), object.__reduce_ex__(self, 2)[2]

    key = (quant_class, float_class)
    if key not in _combined:
        body = {"__reduce_ex__": reduce, "__module__": float_class.__module__, "__doc__": quant_class.__doc__}
        made: Any = type(f"Quant{float_class.__name__}", key, body)
        _combined[key] = made
    return _combined[key]


def _new_combined(quant_class: type[nn.Module], float_class: type[nn.Module]) -> nn.Module:
    cls = _combined_class(quant_class, float_class)
    return cls.__new__(cls)
