"""Example inputs and batches: one form for the three that callers may give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qat.errors import ExportError

BATCH_NAME = "batch"
"""Name of the dynamic first dimension in the file."""


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a tensor, a sequence (positional) or a mapping (keywords)."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    return (inputs,), {}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested sequences and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def map_tensors(value: Any, change: Any) -> Any:
    """The same nesting with `change(tensor)` in each tensor's place; anything else stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def batch_shapes(inputs: Any) -> Any:
    """`dynamic_shapes` for torch.export in which dimension 0 of every tensor is the batch.

    Raises:
        ExportError: no tensor has dimensions, or the tensors' first dimensions differ.
    """
    sizes = sorted({tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()})
    if len(sizes) != 1:
        raise ExportError(
            f"dynamic_batch=True needs example inputs that share dimension 0, but their sizes are {sizes}. "
            "Pass dynamic_shapes (as for torch.export), or dynamic_batch=False."
        )
    args, kwargs = as_call(inputs)

    def spec(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {0: BATCH_NAME} if value.dim() else {}
        if isinstance(value, Mapping):
            return {key: spec(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([spec(item) for item in value])
        return None

    return {key: spec(item) for key, item in kwargs.items()} if kwargs else tuple(spec(item) for item in args)


def repeated(inputs: Any, times: int = 2) -> Any:
    """Inputs with dimension 0 of every tensor repeated; torch.export would fix a dimension of size 1."""
    return map_tensors(inputs, lambda x: torch.cat([x] * times) if x.dim() else x)


def feeds(inputs: Any, names: Sequence[str]) -> dict[str, Any]:
    """NumPy arrays for a file's inputs: by name for keyword inputs, else in order.

    Raises:
        ExportError: the file has another number of inputs than tensors were given.
    """
    arrays = {
        key: value.detach().cpu().numpy() for key, value in as_call(inputs)[1].items() if isinstance(value, Tensor)
    }
    if set(arrays) == set(names):
        return arrays
    ordered = [tensor.detach().cpu().numpy() for tensor in tensors_in(inputs)]
    if len(ordered) != len(names):
        raise ExportError(
            f"the file has {len(names)} inputs ({', '.join(names)}) but {len(ordered)} tensors were given. "
            "Give the inputs that the model was exported with."
        )
    return dict(zip(names, ordered, strict=True))
