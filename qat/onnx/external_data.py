"""Weights that an ONNX file keeps in other files: a file from a stranger must not name one outside its own folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any


def external_locations(proto: Any) -> list[str]:
    """Names of the files that any tensor of a ModelProto is stored in, subgraphs, functions and attributes included."""
    entries = (entry for tensor in _tensors(proto) for entry in tensor.external_data)
    return sorted({str(entry.value) for entry in entries if entry.key == "location"})


def escaping_locations(proto: Any, folder: str | Path) -> list[str]:
    """Those that lie outside `folder`: absolute, with `..`, or through a symbolic link."""
    root = Path(folder).resolve()
    return [location for location in external_locations(proto) if _escapes(location, root)]


def _escapes(location: str, root: Path) -> bool:
    windows = PureWindowsPath(location)  # reads both kinds of separator
    if windows.is_absolute() or windows.root or windows.drive or ".." in windows.parts or "\0" in location:
        return True
    return not (root / location).resolve().is_relative_to(root)


def _tensors(message: Any) -> Iterator[Any]:
    """Every TensorProto inside a protobuf message whose data lies elsewhere."""
    if message.DESCRIPTOR.name == "TensorProto":
        if message.data_location == message.EXTERNAL:
            yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "DESCRIPTOR") else value:
                yield from _tensors(part)
