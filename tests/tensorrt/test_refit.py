from pathlib import Path
from types import SimpleNamespace

import pytest

from qat.errors import EngineError
from qat.tensorrt.api import Library
from qat.tensorrt.engine import LoadedEngine
from qat.tensorrt.log import LogHub
from qat.tensorrt.refit import refit_engine


class _Refitter:
    missing: tuple[str, ...] = ()

    def __init__(self, engine, logger) -> None:
        self.engine = engine

    def refit_cuda_engine(self) -> bool:
        self.engine.refitted_from = None if self.missing else self.engine.loaded_from
        return not self.missing

    def get_missing_weights(self) -> list[str]:
        return list(self.missing)


class _ParserRefitter:
    num_errors = 1
    fits = True

    def __init__(self, refitter, logger) -> None:
        self.refitter = refitter

    def refit_from_file(self, path: str) -> bool:
        self.refitter.engine.loaded_from = path
        return self.fits

    def get_error(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(desc=lambda: "conv1.weight has another shape")


def _loaded(refittable: bool = True, **refitter) -> LoadedEngine:
    parser = type("Parser", (_ParserRefitter,), {k: v for k, v in refitter.items() if k == "fits"})
    weights = type("Weights", (_Refitter,), {k: v for k, v in refitter.items() if k == "missing"})
    library = Library("tensorrt", "11.4", SimpleNamespace(Refitter=weights, OnnxParserRefitter=parser), LogHub())
    return LoadedEngine(library, SimpleNamespace(refittable=refittable), None, Path("m.engine"))


def test_weights_come_from_the_file(write_toy) -> None:
    loaded, path = _loaded(), write_toy()
    refit_engine(loaded, path)
    assert loaded.engine.refitted_from == str(path)


def test_what_does_not_fit_is_explained(write_toy, tmp_path) -> None:
    with pytest.raises(EngineError, match="--refit"):
        refit_engine(_loaded(refittable=False), write_toy())
    with pytest.raises(EngineError, match="no ONNX file"):
        refit_engine(_loaded(), tmp_path / "none.onnx")
    with pytest.raises(EngineError, match=r"conv1\.weight has another shape"):
        refit_engine(_loaded(fits=False), write_toy())
    with pytest.raises(EngineError, match=r"missing weights \['fc\.bias'\]"):
        refit_engine(_loaded(missing=("fc.bias",)), write_toy())
