import numpy as np
import pytest

from qat.errors import RunnerError
from qat.runtime.summary import OutputSummary, summarize_outputs


def test_batches_add_up() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((6, 4)).astype(np.float32)
    array = reference + np.float32(0.25)
    array[5, reference[5].argmin()] = 9
    summary = OutputSummary()
    for part in (slice(0, 4), slice(4, 6)):
        summary.add(array[part], reference[part])
    noise = ((array.astype(np.float64) - reference) ** 2).sum()
    assert summary.sqnr.db == pytest.approx(10 * np.log10((reference.astype(np.float64) ** 2).sum() / noise))
    assert (summary.count, summary.shape, summary.high) == (6, (4,), 9.0)
    assert summary.same_top1 == pytest.approx(100 * 5 / 6)
    assert summary.difference == pytest.approx(float(np.abs(array - reference).max()))
    assert summary.row(compared=True)[0] == "4" and len(summary.row(compared=False)) == 3


def test_maps_have_no_top1_and_may_be_empty() -> None:
    summary = OutputSummary()
    summary.add(np.zeros((0, 3, 2, 2)), np.zeros((0, 3, 2, 2)))
    assert summary.same_top1 is None and summary.row(compared=True)[-1] == "-"


def test_outputs_that_do_not_match_are_refused() -> None:
    with pytest.raises(RunnerError, match="'y' is not among those of the other model, \\['z'\\]"):
        summarize_outputs({}, {"y": np.zeros((1, 2))}, {"z": np.zeros((1, 2))})
    with pytest.raises(RunnerError, match="shape"):
        summarize_outputs({}, {"y": np.zeros((1, 2))}, {"y": np.zeros((1, 3))})
