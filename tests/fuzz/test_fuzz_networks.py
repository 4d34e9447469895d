"""Random networks through prepare, calibrate, export, lint and ONNX Runtime. benchmarks/fuzz.py runs many more."""

from __future__ import annotations

import random

import pytest
from fuzz_cases import cached_translations, draw_case, run_case

CASES = 200
"""About half of them have a layer to quantize and export, about a second of one core each."""


@pytest.mark.parametrize("first", range(0, CASES, 8))
def test_random_networks_export_cleanly(first: int) -> None:
    exported = 0
    with cached_translations():
        for seed in range(first, first + 8):
            network, settings = draw_case(random.Random(seed))
            try:
                exported += run_case(network, settings, seed).quantizers > 0
            except Exception as error:
                raise AssertionError(f"seed {seed}, {settings}:\n{network.source}") from error
    assert exported


def test_networks_are_drawn_alike_and_differ() -> None:
    sources = [draw_case(random.Random(seed))[0].source for seed in (1, 1, 2)]
    assert sources[0] == sources[1] != sources[2]
