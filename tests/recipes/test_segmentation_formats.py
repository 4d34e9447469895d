"""DICOM and NIfTI files, written and read by their own libraries."""

from pathlib import Path

import numpy as np
import pytest
import torch

from qat.errors import ConfigError
from recipes.segmentation_config import MaskDataConfig
from recipes.segmentation_data import load_masks
from recipes.segmentation_formats import read_images, read_masks, split_suffix

ROWS, COLUMNS, SLICES = 40, 48, 3
VOLUME = np.random.default_rng(0).integers(-1000, 1000, (SLICES, ROWS, COLUMNS), dtype=np.int16)


def write_nifti(path: Path, volume: np.ndarray) -> Path:
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel: pip install 'qat[medical]'")
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume.transpose(2, 1, 0), np.eye(4)), path)
    return path


def write_dicom(path: Path, pixels: np.ndarray, kind: str = "MONOCHROME2", **tags: object) -> Path:
    pydicom = pytest.importorskip("pydicom", reason="needs pydicom: pip install 'qat[medical]'")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = pydicom.uid.CTImageStorage, "1.2.3"
    dataset = pydicom.Dataset()
    dataset.file_meta = meta
    dataset.SOPClassUID, dataset.SOPInstanceUID = meta.MediaStorageSOPClassUID, "1.2.3"
    dataset.Rows, dataset.Columns, dataset.SamplesPerPixel = *pixels.shape, 1
    dataset.PhotometricInterpretation, dataset.PixelRepresentation = kind, 1
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 16, 15
    dataset.PixelData = pixels.astype("<i2").tobytes()
    for name, value in tags.items():
        setattr(dataset, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def test_suffixes_of_two_parts() -> None:
    assert split_suffix(Path("a/scan.1.NII.gz")) == ("scan.1", ".nii.gz")
    assert split_suffix(Path("x.png")) == ("x", ".png")
    assert split_suffix(Path("notes.txt")) == ("notes.txt", "")


def test_a_nifti_volume_is_its_slices(tmp_path: Path) -> None:
    images = read_images(write_nifti(tmp_path / "v.nii.gz", VOLUME), 3)
    assert [image.shape for image in images] == [(3, ROWS, COLUMNS)] * SLICES
    assert all(image.dtype == np.uint8 for image in images)
    grey = np.stack([image[0] for image in images])
    assert (grey.min(), grey.max()) == (0, 255)
    assert np.corrcoef(grey.ravel(), VOLUME.ravel())[0, 1] > 0.999, "rows, columns and slices are where they were"
    masks = read_masks(write_nifti(tmp_path / "m.nii", (VOLUME > 0).astype(np.uint8)))
    assert np.array_equal(np.stack(masks), VOLUME > 0)
    with pytest.raises(ConfigError, match=r"no whole numbers in 0\.\.255"):
        read_masks(write_nifti(tmp_path / "f.nii", VOLUME))


def test_dicom_uses_its_rescaling_its_window_and_its_polarity(tmp_path: Path) -> None:
    pixels = VOLUME[0]
    (plain,) = read_images(write_dicom(tmp_path / "a.dcm", pixels), 1)
    assert plain.shape == (1, ROWS, COLUMNS) and np.corrcoef(plain.ravel(), pixels.ravel())[0, 1] > 0.999
    (inverted,) = read_images(write_dicom(tmp_path / "b.dcm", pixels, "MONOCHROME1"), 1)
    assert np.corrcoef(inverted.ravel(), pixels.ravel())[0, 1] < -0.999
    tags = {"RescaleSlope": 2, "RescaleIntercept": 10, "WindowCenter": 10, "WindowWidth": 400}
    (window,) = read_images(write_dicom(tmp_path / "c.dcm", pixels, **tags), 1)
    assert (window[0][pixels < -110] == 0).all() and (window[0][pixels > 110] == 255).all()
    inside = np.abs(pixels) < 90
    assert np.corrcoef(window[0][inside], pixels[inside])[0, 1] > 0.999


def test_volumes_are_split_by_file(tmp_path: Path) -> None:
    for number in range(4):
        volume = np.roll(VOLUME, number, axis=1)
        write_nifti(tmp_path / "images" / f"p{number}.nii.gz", volume)
        write_nifti(tmp_path / "masks" / f"p{number}.nii.gz", (volume > 0).astype(np.uint8))
    data = load_masks(MaskDataConfig(dir=tmp_path, patch=32, mask_values=(0, 1), val_share=0.25), torch.device("cpu"))
    assert (len(data.train_pairs), len(data.val_pairs)) == (9, 3)
    patient = data.val_pairs[0].name.split("_")[0]
    assert [pair.name for pair in data.val_pairs] == [f"{patient}_{n:03d}" for n in range(3)]
    write_nifti(tmp_path / "masks" / "p1.nii.gz", np.zeros((2, ROWS, COLUMNS), np.uint8))
    with pytest.raises(ConfigError, match=r"p1\.nii\.gz has 2 slices of .* and its image 3 of"):
        load_masks(MaskDataConfig(dir=tmp_path, patch=32, mask_values=(0, 1)), torch.device("cpu"))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for name, package in (("x.dcm", "pydicom"), ("y.nii", "nibabel")):
        pytest.importorskip(package, reason="needs qat[medical]")
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(ConfigError, match=rf"{name} cannot be read"):
            read_images(tmp_path / name, 3)
