"""Evaluations, rankings and proposals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sensitivity_networks import NAMES, Chain, Everything, batches, calibrated_chain, float_layers
from torch import nn

import qat
from qat.errors import ConfigError
from qat.selectors import exact
from qat.sensitivity import Evaluations, OutputScore, pareto, propose, rank_sensitivity


def by_layers(worth: dict[str, float]) -> Any:
    """An evaluate whose score grows by a known amount for each float layer; it counts its calls."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        evaluate.calls.append(float_layers(model))  # type: ignore[attr-defined]
        score = 50 + sum(worth.get(name, 0) for name in float_layers(model))
        return {"score": score, "loss": 100 - score}

    evaluate.calls = []  # type: ignore[attr-defined]
    return evaluate


@pytest.mark.parametrize("mode", ["leave_one_out", "quantize_one"])
def test_each_layer_is_switched_alone_and_ranked(mode: Any) -> None:
    evaluate = by_layers({"ab": 5.0, "a*": 3.0})
    model = calibrated_chain().train()
    before = Everything(model)
    evaluations = Evaluations(model, evaluate)
    ranking = rank_sensitivity(evaluations, "score", mode=mode, progress=False)
    before.check(model)
    assert [row.name for row in ranking.rows[:2]] == ["ab", "a*"]
    assert [row.score for row in ranking.rows] == [5.0, 3.0, 0.0, 0.0, 0.0]
    assert (ranking.float_metrics["score"], ranking.int8_metrics["score"]) == (58, 50)
    alone = [{name} if mode == "leave_one_out" else set(NAMES) - {name} for name in NAMES]
    assert evaluate.calls[2:] == alone
    lower = rank_sensitivity(evaluations, "loss", mode=mode, lower_is_better=True, progress=False)
    assert [row.score for row in lower.rows] == [5.0, 3.0, 0.0, 0.0, 0.0]
    assert len(evaluate.calls) == 7, "the second ranking needs no evaluation"
    with pytest.raises(ConfigError, match="metric='top1' is not among those that evaluate gave: score, loss"):
        rank_sensitivity(evaluations, "top1")


def test_state_is_restored_where_evaluate_raises() -> None:
    model = calibrated_chain()
    model.get_submodule("ab").train()
    before = Everything(model)

    def fails(_: nn.Module) -> dict[str, float]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Evaluations(model, fails).of(())
    before.check(model)


def test_a_killed_run_continues_and_ends_alike(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "layers.json"
    worth = {"a": 1.0, "b?": 2.0}
    whole = rank_sensitivity(Evaluations(calibrated_chain(), by_layers(worth)), "score", progress=False)

    class KilledError(Exception):
        pass

    counted = by_layers(worth)

    def killed(model: nn.Module) -> dict[str, float]:
        if len(counted.calls) == 4:
            raise KilledError
        metrics: dict[str, float] = counted(model)
        return metrics

    with pytest.raises(KilledError):
        rank_sensitivity(Evaluations(calibrated_chain(), killed, path, {"images": 10}), "score", progress=False)
    assert len(json.loads(path.read_text())["evaluations"]) == 4
    resumed = by_layers(worth)
    again = rank_sensitivity(Evaluations(calibrated_chain(), resumed, path, {"images": 10}), "score", progress=False)
    assert len(resumed.calls) == 3
    assert again.to_dict() == whole.to_dict()
    with pytest.raises(ConfigError, match="images was 10 and is now 20"):
        Evaluations(calibrated_chain(), resumed, path, {"images": 20})
    with pytest.raises(ConfigError, match="weights was"):
        Evaluations(calibrated_chain(ab=2.0), resumed, path, {"images": 10})
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ConfigError, match=r"layers\.json is not a file of evaluations"):
        Evaluations(calibrated_chain(), resumed, path, {"images": 10})


def test_the_fewest_layers_for_a_target() -> None:
    # On its own each of a, ab and a* gains; but a* does all that a and ab do together.
    def evaluate(model: nn.Module) -> dict[str, float]:
        left = float_layers(model)
        gain = {"a": 4.0, "ab": 3.0, "a*": 2.0}
        return {"score": 60.0 if {"a*", "b?"} <= left else 50 + sum(gain.get(n, 0) for n in left) / 2}

    evaluations = Evaluations(calibrated_chain(), evaluate)
    ranking = rank_sensitivity(evaluations, "score", progress=False)
    proposal = propose(evaluations, ranking, "score", target=60.0, progress=False)
    assert proposal.reached
    assert proposal.members == ("a*", "b?"), "layers that the target does not need are quantized again"
    assert proposal.metrics == {"score": 60.0}
    assert [step.change for step in proposal.steps[:4]] == ["", "+a", "+ab", "+a*"]
    missed = propose(evaluations, ranking, "score", target=61.0, progress=False)
    assert not missed.reached
    assert set(missed.members) == set(NAMES)
    nothing = propose(evaluations, ranking, "score", target=50.0, progress=False)
    assert nothing.reached
    assert nothing.members == ()
    whole = propose(evaluations, ranking, "score", target=50.0, whole=True, progress=False)
    assert whole.members == ()
    assert len(whole.steps) == 1 + len(NAMES)


def test_models_made_anew_are_evaluated_instead() -> None:
    original = calibrated_chain()
    made = []

    def build(names: tuple[str, ...]) -> nn.Module | None:
        made.append(names)
        if len(names) == 4:
            return None
        model = Chain()
        qat.quantize_(model, exclude=[exact(name) for name in names])
        qat.calibrate(model, batches(), progress=False)
        return model

    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(model)
        return {"quantizers": sum(q.state is qat.QuantizerState.QUANTIZING for _, q in qat.named_quantizers(model))}

    evaluations = Evaluations(original, evaluate, build=build)
    units = evaluations.units
    counts = [evaluations.of(units[:count])["quantizers"] for count in (0, 1, 4, 5)]
    assert counts == [10, 8, 0, 0]
    assert made == [(NAMES[0],), NAMES[:4]]
    assert [model is original for model in seen] == [True, False, True, True]


def test_scores_without_labels_find_the_ruined_layer() -> None:
    model = calibrated_chain(ab=40.0)
    before = Everything(model)
    evaluations = Evaluations(model, OutputScore(model, batches()))
    for metric, lower in (("sqnr_db", False), ("kl", True)):
        for mode in ("leave_one_out", "quantize_one"):
            ranking = rank_sensitivity(evaluations, metric, mode=mode, lower_is_better=lower, progress=False)
            assert ranking.rows[0].name == "ab", (metric, mode)
    assert ranking.float_metrics == {"sqnr_db": 144.5, "kl": 0.0}
    assert 0 < ranking.int8_metrics["sqnr_db"] < 40  # type: ignore[operator]
    target = 0.9 * evaluations.of([u for u in evaluations.units if u.name == "ab"])["sqnr_db"]  # type: ignore[operator]
    assert propose(evaluations, ranking, "sqnr_db", target, progress=False).members == ("ab",)
    before.check(model)


def test_names_are_matched_exactly() -> None:
    for left in NAMES:
        model = Chain()
        report = qat.quantize_(model, exclude=[exact(left)])
        assert set(report.left_float) == {left}
    for left in ("a", "a[0]"):
        model = qat.prepare(Chain(), torch.randn(2, 16), exclude=[exact(left)], keep_float_logits=False)
        assert [name for name, why in qat.summary(model).left_float.items() if "excluded" in why] == [left]


def test_an_uncalibrated_model_is_refused() -> None:
    model = Chain()
    qat.quantize_(model)
    with pytest.raises(ConfigError, match=r"quantizer 'a\._input_quantizer' is not calibrated"):
        Evaluations(model, by_layers({}))
    qat.set_quantizer_state(model, qat.QuantizerState.PASSTHROUGH)
    with pytest.raises(ConfigError, match="no quantizer of Chain quantizes"):
        Evaluations(model, by_layers({}))


def test_a_metric_that_is_not_finite_is_the_worst(tmp_path: Path) -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"score": 1.0 if "ab" in float_layers(model) else float("nan")}

    evaluations = Evaluations(calibrated_chain(), evaluate, tmp_path / "a.json")
    ranking = rank_sensitivity(evaluations, "score", progress=False)
    assert ranking.rows[0].name == "ab"
    assert ranking.rows[0].score is None
    assert len(pareto(evaluations, dict.fromkeys(evaluations.units, 20.0), "score")) == 2
