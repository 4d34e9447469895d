"""Patches: image and mask move together, and depend on seed, epoch and batch alone."""

from itertools import islice

import pytest
import torch
from torch import Tensor

from recipes.segmentation_config import AugmentConfig
from recipes.segmentation_patches import Normalize, PatchLoader, class_pixels, cut_patches, sampling_grid

MOVES = AugmentConfig(flip=True, rotate=180, scale=0.2, elastic=4)
PLAIN = Normalize((0.0,), (1.0,), "cpu")


def scene(height: int = 96, width: int = 128, seed: int = 0) -> tuple[Tensor, Tensor]:
    """An image whose pixels say the class: 200 inside some rectangles, 50 outside."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(height, width, dtype=torch.uint8)
    for _ in range(6):
        top, left = (int(torch.randint(0, side - 30, (1,), generator=generator)) for side in (height, width))
        mask[top : top + 24, left : left + 28] = 1
    return (50 + 150 * mask).expand(3, -1, -1).contiguous(), mask


def loader(
    count: int = 24, balance: float = 0.0, changes: AugmentConfig | None = MOVES, sizes=((96, 128),) * 3, seed: int = 0
) -> PatchLoader:
    pairs = [scene(*size, number) for number, size in enumerate(sizes)]
    images, masks = [image for image, _ in pairs], [mask for _, mask in pairs]
    return PatchLoader(images, masks, class_pixels(masks, 2, 0), 32, count, 4, balance, PLAIN, changes, seed)


def test_a_plain_crop_takes_the_pixels_as_they_are() -> None:
    image, mask = torch.randint(0, 256, (3, 40, 50)).byte(), torch.randint(0, 3, (40, 50)).byte()
    centre = torch.tensor([[4 + 15.5, 7 + 15.5]])
    patch, classes = cut_patches(image[None], mask[None], centre, 32, None, torch.Generator())
    torch.testing.assert_close(patch[0], image[:, 4:36, 7:39].float(), atol=0.01, rtol=0)
    assert torch.equal(classes[0], mask[4:36, 7:39].long())


def test_plain_patches_are_crops_of_the_images() -> None:
    plain = loader(changes=None)
    for patches, classes in plain:
        assert set((patches * 255).round().unique().tolist()) <= {50.0, 200.0}
        assert torch.equal((patches[:, 0] * 255 > 125).long(), classes)


def test_image_and_mask_move_together() -> None:
    agreed, moved = [], []
    for (patches, classes), (still, _) in zip(loader(), loader(changes=None), strict=True):
        agreed.append(((patches[:, 0] > 0.5).long() == classes).float().mean())
        moved.append((patches - still).abs().mean())
    assert torch.stack(agreed).mean() > 0.98, "bilinear and nearest differ at the edges of the rectangles only"
    assert torch.stack(moved).mean() > 0.05, "the augmentation changed nothing"


def test_a_patch_is_turned_and_enlarged_about_its_centre() -> None:
    centre, size = torch.tensor([[20.0, 30.0]]), (64, 64)
    middle = (2 * centre.flip(1) + 1) / 64 - 1
    full = torch.tensor([[0.9, 0.9, 1.0, 1.0]])  # neither mirrored, the largest angle and size
    plain = sampling_grid(centre, 16, size, None, full)
    turned = sampling_grid(centre, 16, size, AugmentConfig(flip=False, rotate=90), full)
    torch.testing.assert_close(turned, plain.rot90(-1, (1, 2)), atol=1e-5, rtol=0)
    larger = sampling_grid(centre, 16, size, AugmentConfig(flip=False, scale=0.5), full)
    torch.testing.assert_close(1.5 * (larger - middle), plain - middle, atol=1e-5, rtol=0)


def test_brightness_and_contrast_leave_the_mask_alone() -> None:
    bright = AugmentConfig(flip=False, brightness=0.2, contrast=0.3)
    for (patches, classes), (still, same) in zip(loader(changes=bright), loader(changes=None), strict=True):
        assert torch.equal(classes, same)
        assert patches.min() >= 0 and patches.max() <= 1
        assert not torch.allclose(patches, still, atol=0.01)


def test_batches_depend_on_seed_epoch_and_number_alone() -> None:
    first, again = list(loader()), list(loader())
    assert len(first) == len(loader()) == 6
    assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(first, again, strict=True))
    resumed = loader()
    resumed.skip(4)
    assert torch.equal(next(iter(resumed))[0], first[4][0])
    assert len(list(resumed)) == 6, "a skip counts for one epoch"
    other = loader()
    other.set_epoch(1)
    assert not torch.equal(next(iter(other))[0], first[0][0])
    assert not torch.equal(next(iter(loader(seed=1)))[0], first[0][0])


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_a_rare_class_is_seen(balance: float) -> None:
    masks = [torch.zeros(128, 128, dtype=torch.uint8) for _ in range(8)]
    masks[3][60:63, 20:23] = 1
    images = [torch.zeros(3, 128, 128, dtype=torch.uint8) for _ in masks]
    pixels = class_pixels(masks, 2, 0)
    rare = PatchLoader(images, masks, pixels, 32, 64, 16, balance, PLAIN, None, 0)
    share = torch.cat([(classes == 1).flatten(1).any(1) for _, classes in rare]).float().mean()
    assert 0.35 < share < 0.65 if balance else share < 0.1


def test_images_may_differ_in_size_and_be_smaller_than_a_patch() -> None:
    mixed = loader(sizes=((96, 128), (40, 60), (31, 45)), balance=0.5)
    patches, classes = zip(*islice(mixed, 3), strict=True)
    assert torch.cat(patches).shape == (12, 3, 32, 32) and torch.cat(classes).shape == (12, 32, 32)
    assert torch.cat(classes).unique().tolist() == [0, 1]


def test_classes_that_do_not_occur_have_no_pixels() -> None:
    found = class_pixels([torch.tensor([[0, 2], [2, 255]]).byte()], 4, 0)
    assert [sorted(set(map(tuple, places.tolist()))) for places in found] == [[(0, 0, 0)], [(0, 0, 1), (0, 1, 0)]]
