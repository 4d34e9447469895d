import dataclasses

import pytest

from qat.tensorrt.build import build_engine
from qat.tensorrt.timing_cache import attach_timing_cache, cache_path, store_timing_cache


@pytest.fixture
def as_tensorrt(rtx):
    """RTX's builder under TensorRT's name: its timing cache serializes, though nothing is measured."""
    return dataclasses.replace(rtx, name="tensorrt")


def _config(library):
    builder = library.trt.Builder(library.log.trt_logger)
    return builder, builder.create_builder_config()


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 100])
def test_missing_empty_and_damaged_caches_are_replaced(content, as_tensorrt, tmp_path) -> None:
    path = tmp_path / "t.cache"
    file = cache_path(path, as_tensorrt)
    if content is not None:
        file.write_bytes(content)
    _builder, config = _config(as_tensorrt)
    assert attach_timing_cache(as_tensorrt, config, path)
    store_timing_cache(as_tensorrt, config, path)
    assert file.read_bytes().startswith(b"ptrt") and not path.exists()


def test_versions_never_share_a_file(as_tensorrt, tmp_path) -> None:
    other = dataclasses.replace(as_tensorrt, version="11.0.0")
    names = {cache_path(tmp_path / "t.cache", library).name for library in (as_tensorrt, other)}
    assert len(names) == 2 and all(name.startswith("t.tensorrt-") and name.endswith(".cache") for name in names)


class _Cache:
    def __init__(self, data: bytes) -> None:
        self.entries = set(filter(None, data.split(b";")))

    def combine(self, other: "_Cache", ignore_mismatch: bool) -> bool:
        self.entries |= other.entries
        return True

    def serialize(self) -> bytes:
        return b";".join(sorted(self.entries))


class _Config:
    """What the timing cache functions use of IBuilderConfig."""

    def create_timing_cache(self, data: bytes) -> _Cache:
        return _Cache(data)

    def set_timing_cache(self, cache: _Cache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return True

    def get_timing_cache(self) -> _Cache:
        return self.cache


def test_what_another_process_stored_in_the_meantime_is_kept(as_tensorrt, tmp_path) -> None:
    path = tmp_path / "t.cache"
    first, second = _Config(), _Config()
    for config, entry in ((first, b"a"), (second, b"b")):
        attach_timing_cache(as_tensorrt, config, path)
        config.cache.entries.add(entry)
    store_timing_cache(as_tensorrt, first, path)
    store_timing_cache(as_tensorrt, second, path)
    assert cache_path(path, as_tensorrt).read_bytes() == b"a;b"


def test_rtx_builds_without_one_and_says_so(write_toy, options, rtx, tmp_path, caplog) -> None:
    path = tmp_path / "t.cache"
    assert build_engine(write_toy(), options, library=rtx, timing_cache=path).engine
    assert "timing cache" in caplog.text and not list(tmp_path.glob("t*.cache"))
