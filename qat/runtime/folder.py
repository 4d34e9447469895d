"""Batches from a folder: images, `.npy` files of one sample each, or `.npz` files for several inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qat.errors import RunnerError
from qat.runtime.runner import Array, Arrays, TensorSpec

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
CROP = 0.875
"""Side of the centre crop as a share of the resized image, where the size to resize to is not given."""


@dataclass(frozen=True)
class ImagePreprocessing:
    """How an image becomes an input: shorter edge resized, centre cropped, scaled to [0, 1], normalized.

    Args:
        mean: of each channel, in [0, 1]; ImageNet's by default.
        std: of each channel.
        resize: shorter edge in pixels before the crop; None for the input's size / 0.875, equal to the size for no
            crop of square images.
        size: side of the input where the network leaves it open.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    resize: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class FolderBatch:
    """Samples of one batch: their names, which are paths in the folder without suffix, and the arrays."""

    names: tuple[str, ...]
    arrays: Arrays


def folder_batches(
    folder: str | Path,
    inputs: Sequence[TensorSpec],
    batch_size: int,
    preprocessing: ImagePreprocessing | None = None,
) -> Iterator[FolderBatch]:
    """Batches of a folder and its subfolders, in the order of the samples' names; the last may be smaller.

    Args:
        folder: of images, or of `.npy` samples, for a network with one input; of `.npz` samples whose arrays have the
            inputs' names for any. Samples have no batch axis. Floats take the type that the network wants.
        inputs: what the network takes.
        batch_size: samples a batch.
        preprocessing: for images.

    Raises:
        RunnerError: no samples, several kinds, samples that differ in shape, unreadable ones, or a network that does
            not take them.
    """
    root = Path(folder)
    files = sample_files(root)
    read = _reader(files[0].suffix.lower(), inputs, preprocessing or ImagePreprocessing())
    types = {spec.name: np.dtype(spec.dtype) for spec in inputs}
    for start in range(0, len(files), batch_size):
        chunk = files[start : start + batch_size]
        samples = [_read(read, file) for file in chunk]
        arrays = {name: _stack(name, [s[name] for s in samples], chunk, dtype) for name, dtype in types.items()}
        yield FolderBatch(tuple(str(f.relative_to(root).with_suffix("")) for f in chunk), arrays)


def sample_files(root: Path) -> list[Path]:
    """Samples of a folder and its subfolders, in order.

    Raises:
        RunnerError: none, or several kinds.
    """
    files = sorted(f for f in root.rglob("*") if f.suffix.lower() in (*IMAGES, ".npy", ".npz") and f.is_file())
    kinds = {"images" if f.suffix.lower() in IMAGES else f.suffix.lower() for f in files}
    if len(kinds) != 1:
        found = f"holds {' and '.join(sorted(kinds))}" if kinds else "holds no samples"
        raise RunnerError(f"'{root}' {found}. Give a folder of images, of .npy files or of .npz files.")
    return files


Read = Callable[[Path], Arrays]


def _reader(suffix: str, inputs: Sequence[TensorSpec], preprocessing: ImagePreprocessing) -> Read:
    names = [spec.name for spec in inputs]
    if suffix == ".npz":
        return lambda file: _read_npz(file, names)
    if len(inputs) != 1:
        raise RunnerError(f"The network takes the inputs {names}: store each sample as an .npz file with these arrays.")
    if suffix == ".npy":
        return lambda file: {names[0]: np.load(file)}
    load = _image_loader(inputs[0], preprocessing)
    return lambda file: {names[0]: load(file)}


def _read(read: Read, file: Path) -> Arrays:
    try:
        return read(file)
    except (OSError, ValueError, SyntaxError) as error:
        raise RunnerError(f"The sample '{file}' cannot be read: {error}. Repair or remove it.") from error


def _read_npz(file: Path, names: list[str]) -> Arrays:
    with np.load(file) as stored:
        if set(stored.files) != set(names):
            raise RunnerError(f"'{file}' holds the arrays {sorted(stored.files)}; the network takes {names}.")
        return {name: stored[name] for name in names}


def _image_loader(spec: TensorSpec, how: ImagePreprocessing) -> Callable[[Path], Array]:
    import torch
    from PIL import Image
    from torchvision.transforms import v2

    shape = spec.shape
    if len(shape) != 4 or shape[1] not in (1, 3) or not spec.dtype.startswith("float"):
        raise RunnerError(
            f"Input '{spec.name}' is {spec.dtype} of shape {shape}, not a float image [N, 3 or 1, H, W]: store "
            "preprocessed samples as .npy files."
        )
    size = [side or how.size for side in shape[2:]]
    if None in size:
        raise RunnerError(f"Input '{spec.name}' has the shape {shape}, open in size: give the size of the images.")
    resize = how.resize or round(min(s for s in size if s) / CROP)
    channels = shape[1]
    steps: list[Any] = [v2.Resize(resize, antialias=True), v2.CenterCrop(size), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(how.mean[:channels], how.std[:channels])]
    transform = v2.Compose(steps)

    def load(file: Path) -> Array:
        with Image.open(file) as image:
            pixels: Array = transform(image.convert("RGB" if channels == 3 else "L")).numpy()
        return pixels

    return load


def _stack(name: str, samples: list[Array], files: Sequence[Path], dtype: np.dtype[Any]) -> Array:
    first = samples[0]
    for sample, file in zip(samples, files, strict=True):
        if sample.shape != first.shape or sample.dtype != first.dtype:
            raise RunnerError(
                f"'{file}' is {sample.dtype} of shape {sample.shape} for input '{name}'; '{files[0].name}' is "
                f"{first.dtype} of shape {first.shape}. All samples must agree."
            )
    joined = np.stack(samples)
    return joined.astype(dtype) if joined.dtype.kind == "f" and dtype.kind == "f" else joined
