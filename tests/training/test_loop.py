import copy
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qat.errors import ConfigError
from qat.quantizer import AmaxMode, QuantizerState
from qat.training import TrainingError, apply_amax_mode, fine_tune, freeze_batch_norm, make_loader, supervised_loss
from tiny_training import NoisyData, TinyNet, evaluate, quiet, train

CRITERION = supervised_loss(nn.CrossEntropyLoss())


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_training_learns_and_writes_its_files(tmp_path: Path) -> None:
    model = TinyNet()
    result = train(tmp_path, model, quiet(epochs=8, lr=0.3, tensorboard=True))
    assert result.best_metric > 0.8
    assert result.best_metric == max(r["metrics"]["accuracy"] for r in result.history) == evaluate(model)["accuracy"]
    assert not model.training
    assert result.steps == 64
    assert json.loads((tmp_path / "history.json").read_text()) == list(result.history)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    wanted = {"train/loss", "train/lr", "metric/accuracy", "amax/input_quantizer", "amax/weight_quantizer"}
    assert set(events.Tags()["scalars"]) == wanted
    assert len(events.Scalars("train/loss")) == 8


def test_the_first_epoch_is_best_where_nothing_improves(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def worse(model: nn.Module) -> dict[str, float]:
        seen.append(_weights(model).clone())
        return {"accuracy": -float(len(seen))}

    model = TinyNet()
    result = fine_tune(model, make_loader(NoisyData(16), 8), CRITERION, worse, quiet(epochs=3), tmp_path)
    assert (result.best_epoch, result.best_metric) == (0, -1.0)
    assert torch.equal(_weights(model), seen[0])
    assert not torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_accumulation_equals_the_big_batch(tmp_path: Path, optimizer: str) -> None:
    torch.manual_seed(0)
    small, big = TinyNet(), TinyNet()
    big.load_state_dict(small.state_dict())
    # 60 samples in batches of 4: the last group of an epoch has three batches, the last big batch 12 samples.
    options: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "clip_norm": 0.5}
    one = train(tmp_path / "a", small, quiet(accumulate=4, **options), dataset=NoisyData(60), batch_size=4)
    two = train(tmp_path / "b", big, quiet(**options), dataset=NoisyData(60), batch_size=16)
    assert one.steps == two.steps == 8
    torch.testing.assert_close(_weights(small), _weights(big), rtol=1e-4, atol=1e-5)


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    model = TinyNet()
    before = _weights(model)
    config = quiet(epochs=1, lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=1e-3)
    train(tmp_path, model, config, batch_size=64)
    assert (_weights(model) - before).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    config = quiet(epochs=3, lr=0.1, warmup_epochs=1.0, schedule="step", step_epochs=1.0)
    rates = [record["lr"] for record in train(tmp_path, config=config).history]
    assert rates == pytest.approx([0.1, 0.1, 0.01])


def test_batch_norm_freezes_from_its_epoch_on(tmp_path: Path) -> None:
    model = TinyNet(norm=True)
    means: list[Tensor] = []

    def watch(model: nn.Module) -> dict[str, float]:
        means.append(model.norm.running_mean.clone())
        return {"accuracy": float(len(means))}

    fine_tune(model, make_loader(NoisyData(32), 8), CRITERION, watch, quiet(epochs=4, freeze_bn_epoch=2), tmp_path)
    assert not torch.equal(means[0], means[1])
    assert torch.equal(means[1], means[2])
    assert torch.equal(means[2], means[3])
    model.train()
    assert freeze_batch_norm(model) == 1
    assert not model.norm.training
    assert model.dropout.training


def test_learned_amax_moves_and_stays_positive(tmp_path: Path) -> None:
    model = TinyNet()
    before = model.input_quantizer.amax.item()
    train(tmp_path, model, quiet(epochs=3, amax_mode="learned", lr=0.5, amax_lr_factor=30.0, optimizer="adamw"))
    assert model.input_quantizer.amax_mode is AmaxMode.LEARNED
    assert model.input_quantizer.amax.item() != before
    for checkpoint in ("best.pt", "last.pt"):
        state = torch.load(tmp_path / checkpoint, weights_only=True)["model"]
        assert bool((state["input_quantizer._amax"] > 0).all())
        assert bool((state["weight_quantizer._amax"] > 0).all())


def test_reestimated_amax_follows_the_data_and_frozen_does_not(tmp_path: Path) -> None:
    moving, fixed = TinyNet(), TinyNet()
    fixed_before = fixed.weight_quantizer.amax.clone()
    moving.input_quantizer.amax = 50.0
    train(tmp_path / "a", moving, quiet(amax_mode="reestimated"))
    train(tmp_path / "b", fixed, quiet(amax_mode="frozen"))
    assert moving.input_quantizer.amax.item() < 45
    assert fixed.input_quantizer.amax.item() == 2.0
    assert torch.equal(fixed.weight_quantizer.amax, fixed_before)


def test_modes_leave_uncalibrated_and_float_quantizers_alone() -> None:
    model = TinyNet()
    model.input_quantizer.set_state(QuantizerState.PASSTHROUGH, "left float")
    assert apply_amax_mode(model, "learned") == [model.weight_quantizer]
    assert [name for name, _ in model.named_parameters() if "amax" in name] == ["weight_quantizer._amax"]


@pytest.mark.parametrize("log_every", [1, 5, 1000])
def test_non_finite_loss_names_epoch_and_step_and_spares_the_checkpoint(tmp_path: Path, log_every: int) -> None:
    calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return CRITERION(model, batch) * (float("nan") if calls == 22 else 1.0)

    config = quiet(epochs=2, accumulate=2, log_every_steps=log_every, checkpoint_every_steps=2)
    # 16 batches and 8 steps an epoch: the 22nd batch, number 21 from 0, is in step 10 of epoch 1.
    with pytest.raises(TrainingError, match=r"loss is nan in epoch 1, optimizer step 10 "):
        fine_tune(TinyNet(), make_loader(NoisyData(64), 4), loss_fn, evaluate, config, tmp_path)
    assert all(bool(v.isfinite().all()) for v in torch.load(tmp_path / "last.pt")["model"].values())


def test_metric_must_be_there_and_finite(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metric='miou' is not among .*: accuracy"):
        train(tmp_path / "a", config=quiet(metric="miou"))
    loader = make_loader(NoisyData(16), 8)
    with pytest.raises(TrainingError, match=r"'accuracy' is nan after epoch 0"):
        fine_tune(TinyNet(), loader, CRITERION, lambda m: {"accuracy": float("nan")}, quiet(), tmp_path / "b")


def test_a_plain_data_loader_and_a_short_one_are_refused(tmp_path: Path) -> None:
    plain = torch.utils.data.DataLoader(NoisyData(8))
    with pytest.raises(ConfigError, match="no set_epoch"):
        fine_tune(TinyNet(), plain, CRITERION, evaluate, quiet(), tmp_path)  # type: ignore[arg-type]

    class Short:
        def __len__(self) -> int:
            return 3

        def set_epoch(self, epoch: int) -> None: ...

        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))])

    with pytest.raises(ConfigError, match="ended epoch 0 after 1 batches, but its length is 3"):
        fine_tune(TinyNet(), Short(), CRITERION, evaluate, quiet(), tmp_path)


def test_precisions_follow_each_other_and_leave_the_model_clean(tmp_path: Path) -> None:
    model = TinyNet()
    seen: set[torch.dtype] = set()
    model.head.register_forward_pre_hook(lambda *_: None)
    model.first.register_forward_hook(lambda m, i, out: seen.add(out.dtype) or None)
    for precision in ("no", "bf16", "no"):
        seen.clear()
        train(
            tmp_path / f"{precision}{len(list(tmp_path.iterdir()))}", model, quiet(epochs=1, mixed_precision=precision)
        )
        assert seen == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert "forward" not in vars(model)
    assert "_original_forward" not in vars(model)
    model.first._forward_hooks.clear()
    model.head._forward_pre_hooks.clear()
    pickle.dump(copy.deepcopy(model), io.BytesIO())


def test_fp16_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU, where fp16 trains")
    with pytest.raises(ConfigError, match=r"fp16.*needs a GPU"):
        train(tmp_path, config=quiet(mixed_precision="fp16"))


def test_float_model_in_channels_last(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    formats: list[bool] = []
    model[0].register_forward_hook(
        lambda m, i, out: formats.append(i[0].is_contiguous(memory_format=torch.channels_last))
    )
    data = torch.utils.data.TensorDataset(torch.rand(4, 3, 6, 6), torch.zeros(4, dtype=torch.long))
    config = quiet(epochs=1, channels_last=True)
    fine_tune(model, make_loader(data, 2), CRITERION, lambda m: {"accuracy": 0.0}, config, tmp_path)
    assert formats == [True, True]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_gpu(tmp_path: Path, precision: str) -> None:
    config = quiet(epochs=8, lr=0.3, mixed_precision=precision, clip_norm=5.0, accumulate=2, amax_mode="learned")
    model = TinyNet()
    assert train(tmp_path, model, config, num_workers=2).best_metric > 0.7
    assert next(model.parameters()).is_cuda


def test_compiled_training_gives_the_same_run_and_leaves_no_trace(tmp_path: Path) -> None:
    plain = train(tmp_path / "eager", config=quiet(compile="no"))
    torch.manual_seed(0)
    model = TinyNet()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = train(tmp_path / "compiled", model, quiet(compile="default"))
    assert [r["loss"] for r in compiled.history] == pytest.approx([r["loss"] for r in plain.history], rel=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    assert model._compiled_call_impl is None
    with pytest.raises(ConfigError, match="compile='fast' is unknown"):
        quiet(compile="fast")
