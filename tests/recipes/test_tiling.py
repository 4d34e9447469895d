"""Inference on images of any size."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from qat.errors import ConfigError
from recipes.segmentation_config import InferenceConfig
from recipes.tiling import blend_window, fill_up, predict_images, predict_tiled, predict_whole, tile_starts

HOW = InferenceConfig(tile=64, overlap=0.25, batch=4, whole=96)


def identity(images: Tensor) -> Tensor:
    return images


@pytest.mark.parametrize("length", [20, 64, 65, 100, 200, 1000])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5])
def test_tiles_cover_the_image_and_overlap(length: int, overlap: float) -> None:
    starts = tile_starts(length, 64, overlap)
    assert starts[0] == 0 and starts[-1] == max(length - 64, 0) and starts == sorted(set(starts))
    assert all(b - a <= 64 * (1 - overlap) + 1 for a, b in pairwise(starts))


@pytest.mark.parametrize("size", [(10, 7), (64, 64), (65, 200), (150, 97)])
def test_what_a_pixelwise_model_computes_comes_back(size: tuple[int, int]) -> None:
    image = torch.randn(3, *size)
    torch.testing.assert_close(predict_tiled(identity, image, HOW), image, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(predict_whole(identity, image[None])[0], image)


def test_every_batch_is_full_where_there_are_more_tiles_than_one() -> None:
    shapes = []

    def spy(images: Tensor) -> Tensor:
        shapes.append(tuple(images.shape))
        return images

    predict_tiled(spy, torch.randn(3, 150, 150), HOW)
    assert shapes == [(4, 3, 64, 64)] * 3, "9 tiles"
    predict_tiled(spy, torch.randn(3, 70, 64), HOW)
    assert shapes[3:] == [(2, 3, 64, 64)]


def test_seams_are_blended() -> None:
    """A model that is wrong towards the border of what it sees, by up to 1."""
    line = (torch.arange(64) - 31.5).abs() / 31.5
    error = torch.maximum(line[:, None], line[None, :])

    def wrong(images: Tensor) -> Tensor:
        return error.expand(len(images), 1, -1, -1)

    image = torch.zeros(3, 160, 160)
    blended = predict_tiled(wrong, image, HOW)[0]
    cut = predict_tiled(wrong, image, InferenceConfig(tile=64, overlap=0.0, batch=4))[0]
    inside = (slice(20, 140), slice(20, 140))
    jumps = [picture[inside].diff(dim=1).abs().max() for picture in (blended, cut)]
    assert jumps[0] < 0.1
    assert blended[inside].mean() < cut[inside].mean() - 0.02, "pixels at a tile's border count less"


def test_the_window_is_never_zero() -> None:
    for overlap in (0.0, 0.1, 0.5):
        window = blend_window(32, overlap)
        assert window.min() > 0 and window.max() == window[16, 16] <= 1
        torch.testing.assert_close(window, window.flip(0, 1))


def test_small_images_are_run_whole_and_large_ones_in_tiles() -> None:
    shapes = []

    def spy(images: Tensor) -> Tensor:
        shapes.append(tuple(images.shape))
        return images[:, :1]

    assert predict_images(spy, torch.randn(2, 3, 90, 50), HOW).shape == (2, 1, 90, 50)
    assert shapes == [(2, 3, 96, 64)]
    assert predict_images(spy, torch.randn(2, 3, 97, 50), HOW).shape == (2, 1, 97, 50)
    assert shapes[1:] == [(2, 3, 64, 64)] * 2


def test_filling_up_mirrors_even_a_single_pixel() -> None:
    assert fill_up(torch.ones(1, 1, 1, 1), 32, 32).eq(1).all()
    column = torch.arange(3.0).view(1, 1, 3, 1).expand(-1, -1, -1, 3)
    assert fill_up(column, 7, 3)[0, 0, :, 0].tolist() == [0, 1, 2, 1, 0, 1, 2]


def test_a_model_that_changes_the_size_is_an_error() -> None:
    with pytest.raises(ConfigError, match="sizes differ"):
        predict_tiled(lambda images: images[..., ::2, ::2], torch.randn(3, 100, 100), HOW)
