from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from qat.tensorrt import BuildOptions, build_engine
from qat.tensorrt.target import RTX_CAPABILITIES, build_targets, rtx_runs_on, why_not_executable

RTX, TENSORRT = SimpleNamespace(is_rtx=True), SimpleNamespace(is_rtx=False)


@pytest.fixture
def gpu(monkeypatch):
    """gpu((8, 9)) pretends that the machine has such a GPU; gpu(None) that it has none."""

    def pretend(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")

    return pretend


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 0), False),  # Volta
        ((7, 5), True),
        ((8, 0), True),
        ((8, 6), True),
        ((8, 7), False),  # Jetson Orin
        ((8, 9), True),
        ((9, 0), False),  # H200: refused, "The engine cannot run on this GPU"
        ((10, 0), False),
        ((12, 0), True),
        ((12, 1), True),
        ((13, 0), True),  # "12.0, and later"
    ],
)
def test_rtx_gpus(capability, runs, gpu) -> None:
    assert rtx_runs_on(capability) is runs
    gpu(capability)
    why = why_not_executable(RTX)
    assert (why == "") is runs
    if not runs:
        assert RTX_CAPABILITIES in why and f"NVIDIA Test has {capability[0]}.{capability[1]}" in why


def test_the_library_knows_these_capabilities(rtx) -> None:
    """Its enum has a member for each capability of ours and for no other, so a new version's GPUs are noticed."""
    members = {m for m in rtx.trt.ComputeCapability.__members__ if m.startswith("SM")}
    known = {(int(m[2:-1]), int(m[-1])) for m in members}
    assert {c for c in known if rtx_runs_on(c)} == known
    listed = [tuple(map(int, c.strip("+ ").split("."))) for c in RTX_CAPABILITIES.split(",")]
    assert set(listed) <= known
    candidates = {(major, minor) for major in range(7, 12) for minor in range(10)}
    assert {c for c in candidates if rtx_runs_on(c)} == {c for c in known if c[0] < 12}


@pytest.mark.parametrize(("capability", "runs"), [((7, 0), False), ((7, 5), True), ((9, 0), True), ((12, 0), True)])
def test_tensorrt_gpus(capability, runs, gpu) -> None:
    gpu(capability)
    why = why_not_executable(TENSORRT)
    assert (why == "") is runs
    assert build_targets(TENSORRT, "8.9") == ()
    if not runs:
        assert "7.5 and later" in why and "7.0" in why


def test_without_a_gpu_rtx_builds_for_the_fallback(gpu) -> None:
    gpu(None)
    assert why_not_executable(RTX).startswith("no GPU: TensorRT for RTX")
    assert why_not_executable(TENSORRT).startswith("no GPU: TensorRT executes only on an NVIDIA GPU")
    assert build_targets(RTX, "8.6") == ("8.6",)
    assert build_targets(TENSORRT, "8.6") == ()


@pytest.mark.parametrize(
    ("capability", "targets"), [((7, 5), ("7.5",)), ((8, 9), ()), ((12, 0), ()), ((9, 0), ("8.6",)), ((7, 0), ("8.6",))]
)
def test_rtx_targets(capability, targets, gpu) -> None:
    """An engine for the default targets runs on what it supports, but not on Turing, which must be named."""
    gpu(capability)
    assert build_targets(RTX, "8.6") == targets


@pytest.mark.parametrize(("target", "int8"), [("7.5", False), ("8.0", True), ("8.9", True), ("12.0", True)])
def test_turing_has_no_int8_convolutions(target, int8, write_toy, options, rtx) -> None:
    """Seen with 1.7.1: a user of such a GPU is told by the coverage."""
    built = build_engine(
        write_toy("qdq16"), BuildOptions(options.profiles, compute_capabilities=(target,)), library=rtx
    )
    kinds = Counter(layer.precision for layer in built.layers if layer.kind == "correlation")
    assert kinds and (set(kinds) == {"int8"}) is int8, kinds
