from collections import namedtuple
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qat.errors import ConfigError
from qat.training import SkippableLoader, make_loader, to_device
from qat.training.loader import TrainLoader
from tiny_training import NoisyData

DATA = NoisyData(20, noise=1.0)


def _epoch(epoch: int, skip: int = 0, **options: object) -> list[Tensor]:
    loader = make_loader(DATA, **{"batch_size": 6, "seed": 3, **options})  # type: ignore[arg-type]
    loader.set_epoch(epoch)
    loader.skip(skip)
    return [inputs for inputs, _ in loader]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_an_epoch_repeats_and_differs_from_others() -> None:
    assert _equal(_epoch(1), _epoch(1))
    assert not _equal(_epoch(1), _epoch(2))
    assert not _equal(_epoch(1), _epoch(1, seed=4))
    assert not _equal(_epoch(0, shuffle=False), _epoch(1, shuffle=False)), "augmentation must change with the epoch"


def test_workers_do_not_change_the_batches_and_outlive_an_epoch() -> None:
    loader = make_loader(DATA, 6, seed=3, num_workers=2)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        assert _equal([x for x, _ in loader], _epoch(epoch))
    assert _equal(_epoch(1, skip=2, num_workers=2), _epoch(1)[2:]), "skip must hold for new workers"
    loader.set_epoch(1)
    loader.skip(2)
    assert _equal([x for x, _ in loader], _epoch(1)[2:])


def test_skip_holds_for_one_iteration_and_keeps_the_batches() -> None:
    assert _equal(_epoch(1, skip=2), _epoch(1)[2:])
    assert _epoch(1, skip=4) == []
    loader = make_loader(DATA, 6)
    loader.skip(2)
    assert [len(list(loader)), len(list(loader)), len(loader)] == [2, 4, 4]


def test_loading_does_not_disturb_the_generators_of_the_main_process() -> None:
    torch.manual_seed(9)
    undisturbed = torch.rand(3)
    torch.manual_seed(9)
    _epoch(0)
    assert torch.equal(torch.rand(3), undisturbed)


def test_ranks_of_torchrun_share_the_batches_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    data = NoisyData(24, noise=1.0)
    whole = [x for x, _ in make_loader(data, 8, seed=3)]
    loader = make_loader(data, 4, seed=3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        parts.append([x for x, _ in loader])
    for batch, left, right in zip(whole, *parts, strict=True):
        assert {tuple(row.tolist()) for row in batch} == {tuple(row.tolist()) for row in torch.cat([left, right])}


def test_protocols() -> None:
    class Plain:
        def __len__(self) -> int:
            return 1

        def set_epoch(self, epoch: int) -> None: ...

        def __iter__(self) -> Iterator[int]:
            return iter([1])

    assert isinstance(Plain(), TrainLoader)
    assert not isinstance(Plain(), SkippableLoader)
    assert isinstance(make_loader(DATA, 4), SkippableLoader)


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"20 samples gives no batch of 32"):
        make_loader(DATA, 32, drop_last=True)
    with pytest.raises(ConfigError, match="batch_size=0"):
        make_loader(DATA, 0)


def test_to_device_keeps_structure_and_sets_memory_format() -> None:
    pair = namedtuple("pair", "x y")
    image = torch.rand(2, 3, 4, 4)
    moved = to_device({"a": [image, "name"], "b": pair(image, 1)}, torch.device("cpu"), channels_last=True)
    assert moved["a"][0].is_contiguous(memory_format=torch.channels_last)
    assert moved["a"][1] == "name"
    assert isinstance(moved["b"], pair)
    assert to_device(image, torch.device("cpu")) is image
