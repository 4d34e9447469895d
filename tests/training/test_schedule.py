import math

import pytest

from qat.errors import ConfigError
from qat.training import Schedule, TrainConfig, qat_epochs


def test_cosine_falls_from_one_to_the_final_factor() -> None:
    schedule = Schedule(total_steps=100, final_factor=0.1)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(50) == pytest.approx(0.55)
    assert schedule.factor(25) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule.factor(100) == pytest.approx(0.1)
    assert schedule.factor(1000) == pytest.approx(0.1)


def test_warm_up_is_linear_then_cosine_starts_at_one() -> None:
    schedule = Schedule(total_steps=14, warmup_steps=4)
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.factor(9) == pytest.approx(0.5)


def test_step_decays_counted_from_the_end_of_warm_up() -> None:
    schedule = Schedule(total_steps=10, kind="step", warmup_steps=2, decay_steps=3, gamma=0.1)
    assert [schedule.factor(s) for s in range(10)] == pytest.approx([0.5, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01])


def test_config_counts_optimizer_steps() -> None:
    schedule = TrainConfig(epochs=6, schedule="step", warmup_epochs=0.5).lr_schedule(steps_per_epoch=10)
    assert (schedule.total_steps, schedule.warmup_steps, schedule.decay_steps) == (60, 5, 20)


@pytest.mark.parametrize(("epochs", "share", "expected"), [(90, 0.1, 9), (25, 0.1, 3), (3, 0.1, 1), (10, 1.0, 10)])
def test_qat_epochs(epochs: int, share: float, expected: int) -> None:
    assert qat_epochs(epochs, share) == expected


@pytest.mark.parametrize(("epochs", "share", "field"), [(0, 0.1, "float_epochs=0"), (10, 0.0, r"share=0\.0")])
def test_qat_epochs_refuses(epochs: int, share: float, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        qat_epochs(epochs, share)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"lr": -1.0}, r"lr=-1\.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"amax_mode": "moving"}, "amax_mode='moving'"),
        ({"clip_norm": 0.0}, r"clip_norm=0\.0"),
        ({"final_lr_factor": 1.5}, r"final_lr_factor=1\.5"),
        ({"freeze_bn_epoch": -1}, "freeze_bn_epoch=-1"),
        ({"epochs": 1, "warmup_epochs": 2.0}, r"warmup_epochs=2\.0"),
    ],
)
def test_config_names_the_field_that_is_wrong(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainConfig(**changes)  # type: ignore[arg-type]


def test_jsonargparse_reads_the_config_and_refuses_unknown_keys() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--train", type=TrainConfig, default=TrainConfig())
    arguments = ["--train.epochs=3", "--train.clip_norm=1.5", "--train.schedule=step", "--train.freeze_bn_epoch=null"]
    parsed = parser.instantiate_classes(parser.parse_args(arguments)).train
    assert parsed == TrainConfig(epochs=3, clip_norm=1.5, schedule="step")
    with pytest.raises(Exception, match="epoch_count"):
        parser.parse_args(["--train.epoch_count=3"])


def test_identity_leaves_out_what_does_not_change_weights() -> None:
    changed = TrainConfig(progress=False, tensorboard=False, log_every_steps=3, checkpoint_every_steps=7)
    assert changed.identity() == TrainConfig().identity()
    assert TrainConfig(seed=1).identity() != TrainConfig().identity()
