"""Reading pictures and medical images: what Pillow reads, DICOM through pydicom, NIfTI through nibabel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qat.errors import ConfigError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
DICOM, NIFTI = (".dcm",), (".nii", ".nii.gz")
SUFFIXES = (*PICTURES, *DICOM, *NIFTI)
Pixels = NDArray[np.uint8]


def split_suffix(path: Path) -> tuple[str, str]:
    """Name without suffix, and the suffix in lower case; "" for what is no image. "x.nii.gz" is ("x", ".nii.gz")."""
    name = path.name.lower()
    suffix = next((s for s in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(s)), "")
    return path.name[: len(path.name) - len(suffix)], suffix


def read_images(path: Path, channels: int) -> list[Pixels]:
    """The images of a file, one unless it is a volume or a series: (channels, H, W) each.

    Grey values of medical images become 0..255, from the 0.5th to the 99.5th percentile of the file; of a DICOM file
    within the window that it names.

    Raises:
        ConfigError: it cannot be read, or the package that reads it is not installed.
    """
    if split_suffix(path)[1] in PICTURES:
        pixels = _open(path, "RGB" if channels == 3 else "L")
        return [np.ascontiguousarray(pixels[None] if channels == 1 else pixels.transpose(2, 0, 1))]
    return [np.repeat(grey[None], channels, axis=0) for grey in _to_bytes(_medical(path, windowed=True))]


def read_masks(path: Path) -> list[Pixels]:
    """The masks of a file, values as they are stored: (H, W) each.

    Raises:
        ConfigError: it cannot be read, has several channels, or holds values outside 0..255.
    """
    if split_suffix(path)[1] in PICTURES:
        return [_open(path, None)]
    values = _medical(path, windowed=False)
    masks = values.astype(np.uint8)
    if not np.array_equal(masks, values):
        raise ConfigError(f"mask {path} holds values that are no whole numbers in 0..255. Store class numbers.")
    return list(masks)


def _open(path: Path, mode: str | None) -> Pixels:
    try:
        with Image.open(path) as image:
            if mode is None and image.mode not in ("L", "P", "1"):
                raise ValueError(f"its mode is {image.mode}, and a mask is one channel of 8 bits")
            return np.array(image.convert(mode) if mode else image, dtype=np.uint8)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"image {path} cannot be read: {error}. Repair or remove the file.") from error


def _medical(path: Path, windowed: bool) -> NDArray[Any]:
    """Grey values, shape (slices, H, W)."""
    dicom = split_suffix(path)[1] in DICOM
    try:
        values = _dicom(path, windowed) if dicom else _nifti(path)
    except ImportError as error:
        package = "pydicom" if dicom else "nibabel"
        raise ConfigError(f"{path} needs {package}. Install it with the extra: pip install 'qat[medical]'.") from error
    except Exception as error:  # what a damaged file raises differs from reader to reader
        raise ConfigError(f"image {path} cannot be read: {error}. Repair or remove the file.") from error
    if values.ndim != 3:
        raise ConfigError(f"image {path} has the shape {values.shape}: give grey slices or volumes, (slices, H, W).")
    return values


def _dicom(path: Path, windowed: bool) -> NDArray[Any]:
    import pydicom
    from pydicom.pixels import apply_modality_lut, apply_windowing

    dataset = pydicom.dcmread(path)
    values = dataset.pixel_array
    if windowed:
        values = apply_modality_lut(values, dataset)
        if "WindowCenter" in dataset:
            values = apply_windowing(values, dataset)
        if dataset.PhotometricInterpretation == "MONOCHROME1":
            values = -np.asarray(values, np.float64)
    return values[None] if values.ndim == 2 else values


def _nifti(path: Path) -> NDArray[Any]:
    import nibabel

    values = np.asanyarray(nibabel.load(path).dataobj)
    # Stored as (x, y, slice): rows are y.
    return values[None].transpose(0, 2, 1) if values.ndim == 2 else values.transpose(2, 1, 0, *range(3, values.ndim))


def _to_bytes(values: NDArray[Any]) -> Pixels:
    low, high = np.percentile(values, (0.5, 99.5))
    scaled = (values.astype(np.float64) - low) * (255 / max(high - low, 1e-12))
    return scaled.clip(0, 255).round().astype(np.uint8)
