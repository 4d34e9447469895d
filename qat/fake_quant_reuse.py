"""The last result of a quantizer, for the other readers of the same tensor."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def shareable(x: Tensor) -> bool:
    """Whether a result for x may serve other readers.

    Not in inference mode, where no change is counted; nor under hooks on saved tensors: activation checkpointing runs
    some of the readers again, and each must save what it saved the first time.
    """
    return not (x.is_inference() or torch.is_inference_mode_enabled()) and _saved_tensor_hooks(True) is None


@dataclass
class _Entry:
    """A tensor, held weakly, with its result, and how many readers are still to come."""

    x: weakref.ref[Tensor]
    y: Tensor | None
    key: tuple[Any, ...]
    left: int


class LastResult:
    """Hands the result out again while the very same tensor is asked for and nothing was changed.

    A residual block's input is read by a convolution and by the add, through one quantizer: the quantized tensor is
    then made and kept once. It is held until `readers` have had it, because a layer under autocast casts it and lets
    it go, and no longer: the next forward pass may show the same tensor with other values in memory that autograd does
    not watch. A leaf that asks for a gradient is never remembered, since each of its passes has a graph of its own. A
    copy or a pickle of this is empty.

    Args:
        readers: how many places read one tensor in a forward pass.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._entry: _Entry | None = None  # replaced as a whole: DataParallel's threads share this object

    def __deepcopy__(self, memo: dict[int, Any]) -> LastResult:
        return LastResult(self._readers)

    def __reduce__(self) -> tuple[Any, ...]:
        return LastResult, (self._readers,)

    def clear(self) -> None:
        """Forget the tensor and its result."""
        self._entry = None

    def get(self, x: Tensor, amax: Tensor, descriptor: object) -> Tensor | None:
        """The result for x, or None where it must be computed."""
        entry = self._entry
        if entry is None or entry.y is None or entry.x() is not x or entry.key != _key(x, amax, descriptor, entry.y):
            return None
        self._count(entry)
        return entry.y

    def put(self, x: Tensor, amax: Tensor, descriptor: object, y: Tensor) -> None:
        """Remember that y is the result for x."""
        if x.is_leaf and x.requires_grad:
            self._entry = None
        else:
            self._entry = _Entry(weakref.ref(x), y, _key(x, amax, descriptor, y), self._readers - 1)

    def again(self, x: Tensor) -> bool:
        """True where x is the very tensor of the call before, unchanged: it need not be counted again."""
        if x.is_inference():
            return False
        entry, key = self._entry, (x._version, x.data_ptr())
        if entry is not None and entry.x() is x and entry.key == key:
            self._count(entry)
            return True
        self._entry = _Entry(weakref.ref(x), None, key, self._readers - 1)
        return False

    def _count(self, entry: _Entry) -> None:
        entry.left -= 1
        if entry.left <= 0:
            self._entry = None


def _key(x: Tensor, amax: Tensor, descriptor: object, y: Tensor) -> tuple[Any, ...]:
    changes = (x._version, amax._version, y._version)
    return *changes, id(amax), id(descriptor), x.data_ptr(), amax.data_ptr(), x.requires_grad, torch.is_grad_enabled()
