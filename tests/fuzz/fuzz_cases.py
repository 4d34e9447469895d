"""One network through prepare, calibrate, export, lint and ONNX Runtime, and for some through TensorRT for RTX."""

from __future__ import annotations

import functools
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fuzz_networks import Network, draw_network

import qat
from qat.errors import ConfigError
from qat.onnx.lint import Severity, lint
from qat.runtime import OnnxRuntimeRunner

OPSETS = (21, 21, 21, 13, 18, 25)


@dataclass(frozen=True)
class Settings:
    """What one network goes through."""

    placement: str
    method: str
    keep_float_logits: bool
    opset: int
    precision: str
    build: bool = False

    @staticmethod
    def draw(rng: random.Random, build: bool = False) -> Settings:
        """Random settings; those of a build are ones that TensorRT takes."""
        method = rng.choice(("max", "entropy", "mse", "percentile=99.9"))
        placement = rng.choice(("traced", "traced", "modules"))
        precision = rng.choice(("fp32", "fp32", "fp16"))
        return Settings(placement, method, rng.random() < 0.3, rng.choice(OPSETS), precision, build)


@dataclass
class Outcome:
    """What became of it; `refused` where nothing in the network can be quantized."""

    quantizers: int = 0
    refused: str = ""
    warnings: list[str] = field(default_factory=list)
    int8: float | None = None


def run_case(network: Network, settings: Settings, seed: int = 0) -> Outcome:
    """Anything but a clean pass or a refusal is an exception."""
    torch.manual_seed(seed)
    model = network.build()
    batches = [torch.randn(4, *network.sample) for _ in range(2)]
    with torch.no_grad():
        model.train()(batches[0])  # BatchNorm with statistics of its own
        expected = model.eval()(batches[0][:2])
    try:
        if settings.placement == "traced":
            qat.prepare(model, batches[0][:2], keep_float_logits=settings.keep_float_logits)
        else:
            qat.quantize_(model)
    except ConfigError as error:
        return Outcome(refused=str(error).partition(".")[0])
    qat.calibrate(model, batches, settings.method, progress=False)
    with torch.no_grad():
        quantized = model(batches[0][:2])
    for before, after in zip(_tensors(expected), _tensors(quantized), strict=True):
        assert before.shape == after.shape and bool(torch.isfinite(after).all())
    with tempfile.TemporaryDirectory() as folder:
        return _file(model, batches[0][:2], settings, Path(folder) / "m.onnx")


def _tensors(output: Any) -> list[torch.Tensor]:
    return list(output) if isinstance(output, tuple) else [output]


def _file(model: torch.nn.Module, x: torch.Tensor, settings: Settings, path: Path) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = qat.export(model, (x,), path, opset=settings.opset, precision=settings.precision)
    assert report.parity is not None and report.parity.passed
    found = lint(path).at_least(Severity.WARNING)
    errors = [str(finding) for finding in found if finding.severity is Severity.ERROR]
    assert not errors, "\n".join(errors)
    runner = OnnxRuntimeRunner(path)
    with torch.no_grad():
        expected = [t.numpy() for t in _tensors(model(x))]
    results = runner.run({runner.input_names[0]: x.numpy()})
    assert [r.shape for r in results.values()] == [e.shape for e in expected]
    outcome = Outcome(len(report.quantized), warnings=[finding.rule for finding in found])
    if settings.build:
        outcome.int8 = _build(path, x.shape)
    return outcome


def _build(path: Path, shape: torch.Size) -> float:
    from qat.tensorrt import BuildOptions, OnnxGraph, build_engine, inspect_layers, load_library
    from qat.tensorrt.profiles import make_profiles

    small, large = ("x:" + "x".join(map(str, (batch, *shape[1:]))) for batch in (2, 4))
    profiles = tuple(make_profiles([small], [small], [large]))
    options = BuildOptions(profiles=profiles, compute_capabilities=("8.9",), optimization_level=0)
    result = build_engine(path, options, library=load_library("tensorrt_rtx"))
    return inspect_layers(result.layers, OnnxGraph.load(path)).int8_coverage


@contextmanager
def cached_translations() -> Iterator[None]:
    """torch.onnx.export reads the sources of its 500 translations at each call, a third of its time: here once."""
    from torch.onnx._internal.exporter import _registration

    library = _registration.onnxscript_apis
    original = library.get_torchlib_ops
    library.get_torchlib_ops = functools.cache(original)
    try:
        yield
    finally:
        library.get_torchlib_ops = original


def draw_case(rng: random.Random, build: bool = False) -> tuple[Network, Settings]:
    """A network and its settings."""
    return draw_network(rng), Settings.draw(rng, build)
