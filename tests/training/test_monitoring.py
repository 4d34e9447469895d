"""What `monitor` adds to a training run."""

from pathlib import Path

import pytest
import torch

from qat.errors import ConfigError
from tiny_training import TinyNet, quiet, train


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_fine_tune_writes_it_to_tensorboard_and_trains_alike(tmp_path: Path) -> None:
    results = {}
    for monitor in (False, True):
        torch.manual_seed(0)
        model = TinyNet()
        config = quiet(tensorboard=True, monitor=monitor, epochs=2)
        results[monitor] = train(tmp_path / str(monitor), model, config).metrics, model.state_dict()
        assert not any(module._forward_pre_hooks for module in model.modules())
    assert results[True][0] == results[False][0]
    for name, value in results[True][1].items():
        assert torch.equal(value, results[False][1][name]), name
    watched = scalars_of(tmp_path / "True")
    plain = scalars_of(tmp_path / "False")
    added = set(watched) - set(plain)
    assert added == {
        "oscillating/weight_quantizer", "oscillating_weights", "clipped/weight_quantizer", "clipped/input_quantizer"
    }  # fmt: skip
    assert all([step for step, _ in watched[tag]] == [0, 1] for tag in added)
    # Weights only shrink or grow past the amax that they began with, so some of each channel's largest are clipped.
    assert 0 < watched["clipped/weight_quantizer"][1][1] < 30
    assert 0 <= watched["clipped/input_quantizer"][0][1] < 50


def test_settings_that_cannot_be_watched() -> None:
    with pytest.raises(ConfigError, match="monitor=true needs tensorboard=true and compile=no, not tensorboard=False"):
        quiet(monitor=True)
    with pytest.raises(ConfigError, match="compile=default"):
        quiet(monitor=True, tensorboard=True, compile="default")
