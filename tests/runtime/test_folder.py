import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from qat.errors import RunnerError
from qat.runtime import TensorSpec
from qat.runtime.folder import FolderBatch, ImagePreprocessing, folder_batches

ONE = [TensorSpec("x", "float32", (None, 3, 2))]
IMAGE = [TensorSpec("x", "float32", (None, 3, 16, 16))]


def _sizes(batches: list[FolderBatch]) -> list[int]:
    return [len(batch.names) for batch in batches]


def test_samples_come_in_order_and_the_last_batch_is_smaller(tmp_path) -> None:
    for index in range(5):
        np.save(tmp_path / f"{index}.npy", np.full((3, 2), index, np.float32))
    batches = list(folder_batches(tmp_path, ONE, 2))
    assert _sizes(batches) == [2, 2, 1] and batches[1].names == ("2", "3")
    joined = np.concatenate([batch.arrays["x"] for batch in batches])
    assert joined.shape == (5, 3, 2) and joined[:, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_floats_take_the_networks_type_and_integers_keep_theirs(tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    half = [TensorSpec("x", "float16", (None, 3, 2))]
    assert next(folder_batches(tmp_path, half, 1)).arrays["x"].dtype == np.float16
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.int32))
    assert next(folder_batches(tmp_path, half, 1)).arrays["x"].dtype == np.int32


def test_several_inputs_come_from_npz(tmp_path) -> None:
    specs = [TensorSpec("ids", "int64", (None, 4)), TensorSpec("mask", "float32", (None, 4))]
    for index in range(3):
        np.savez(tmp_path / f"s{index}.npz", ids=np.full(4, index), mask=np.ones(4, np.float32))
    batches = list(folder_batches(tmp_path, specs, 2))
    assert _sizes(batches) == [2, 1] and batches[0].arrays["ids"][:, 0].tolist() == [0, 1]
    np.savez(tmp_path / "s3.npz", ids=np.zeros(4))
    with pytest.raises(RunnerError, match=r"s3\.npz.*\['ids'\]"):
        list(folder_batches(tmp_path, specs, 8))


def _photo(path, size: tuple[int, int], seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return Image.open(path)


def test_images_are_prepared_as_the_recipe_evaluates_them(tmp_path) -> None:
    image = _photo(tmp_path / "cat" / "b.png", (40, 24))
    _photo(tmp_path / "ant" / "z.png", (20, 30), 1)
    (batch,) = folder_batches(tmp_path, IMAGE, 8)
    assert batch.names == ("ant/z", "cat/b") and batch.arrays["x"].shape == (2, 3, 16, 16)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    steps = [v2.Resize(18, antialias=True), v2.CenterCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    expected = v2.Compose([*steps, v2.Normalize(mean, std)])(image)
    np.testing.assert_array_equal(batch.arrays["x"][1], expected.numpy())


def test_open_sizes_and_grey_images(tmp_path) -> None:
    _photo(tmp_path / "a.jpg", (32, 32))
    grey = [TensorSpec("x", "float16", (None, 1, None, None))]
    with pytest.raises(RunnerError, match="open in size"):
        next(folder_batches(tmp_path, grey, 1))
    how = ImagePreprocessing(mean=(0.5,), std=(0.5,), size=8, resize=8)
    pixels = next(folder_batches(tmp_path, grey, 1, how)).arrays["x"]
    assert pixels.shape == (1, 1, 8, 8) and pixels.dtype == np.float16 and abs(pixels).max() <= 1


def test_folders_that_cannot_be_used_are_explained(tmp_path) -> None:
    with pytest.raises(RunnerError, match="no samples"):
        next(folder_batches(tmp_path, ONE, 1))
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(RunnerError, match=r"\.npz file"):
        next(folder_batches(tmp_path, [*ONE, *IMAGE], 1))
    np.save(tmp_path / "b.npy", np.zeros((3, 3), np.float32))
    with pytest.raises(RunnerError, match=r"b\.npy.*must agree"):
        next(folder_batches(tmp_path, ONE, 2))
    (tmp_path / "b.npy").write_bytes(b"nothing")
    with pytest.raises(RunnerError, match=r"b\.npy.*cannot be read"):
        next(folder_batches(tmp_path, ONE, 2))
    (tmp_path / "c.png").write_bytes(b"nothing")
    with pytest.raises(RunnerError, match=r"\.npy and images"):
        next(folder_batches(tmp_path, ONE, 2))


def test_networks_that_take_no_images_are_explained(tmp_path) -> None:
    (tmp_path / "c.png").write_bytes(b"nothing")
    with pytest.raises(RunnerError, match="not a float image"):
        next(folder_batches(tmp_path, ONE, 1))
    with pytest.raises(RunnerError, match=r"c\.png.*cannot be read"):
        next(folder_batches(tmp_path, IMAGE, 1))
