"""Sensitivity analysis of a classification run: which layers lose the accuracy, and which to leave float."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from qat.errors import ConfigError
from qat.files import write_json
from qat.report import environment, format_table
from qat.report.figures import save_png
from qat.report.quantization import pareto_figure, sensitivity_figure
from qat.sensitivity import (
    Evaluations,
    OutputScore,
    Point,
    Proposal,
    Ranking,
    Unit,
    operation_shares,
    pareto,
    propose,
    rank_sensitivity,
)
from qat.sensitivity.proposal import members
from qat.sensitivity.ranking import Level, Mode
from recipes.classification import Classification
from recipes.config import to_plain
from recipes.mixed import build_without, engine_points, mixed_config, spread, verify, write_config
from recipes.run import Metrics
from recipes.stages import claim

Metric = Literal["top1", "val_loss", "sqnr_db", "kl"]
LOWER = ("val_loss", "kl")


@dataclass(frozen=True)
class Options:
    """What is analysed.

    Attributes:
        file: checkpoint of a calibrated or fine-tuned model; None calibrates the float model first.
        metric: what layers are ranked by: "top1" or "val_loss" on the validation images, or, without labels and on
            calibration images, "sqnr_db" or "kl" of the logits.
        mode: "leave_one_out" or "quantize_one".
        level: "layer" or "block".
        drop: points of top-1 below the float model that the proposal may lose.
        whole: go on to the last layer, for the whole curve of accuracy against coverage.
        score_batches: batches for "sqnr_db" and "kl".
        engines: choices on the Pareto front to build engines of.
    """

    file: Path | None = None
    metric: Metric = "top1"
    mode: Mode = "leave_one_out"
    level: Level = "layer"
    drop: float = 0.5
    whole: bool = False
    score_batches: int = 4
    engines: int = 0

    def __post_init__(self) -> None:
        if not self.drop >= 0:
            raise ConfigError(f"--drop={self.drop} asks for more than the float model has. Give 0 or more points.")


class Analysis:
    """The analysis of one run; evaluations are kept in <output_dir>/sensitivity and not repeated."""

    def __init__(self, run: Classification, options: Options) -> None:
        self.run, self.options = run, options
        self.folder = run.config.folder / "sensitivity"
        self.model = self._calibrated()
        configurations = self.folder / "configurations.json"
        self.configurations = Evaluations(self.model, run.evaluate, configurations, build=self._build)
        batch = next(iter(run.data.calibration))
        self.shares = operation_shares(self.model, self.units, [x[:2] for x in batch])

    @property
    def units(self) -> tuple[Unit, ...]:
        """Everything that can be left float."""
        return self.configurations.units

    def _build(self, names: tuple[str, ...]) -> nn.Module | None:
        """The model that a configuration with these names excluded gives."""
        left = [unit for unit in self.units if not set(unit.members) & set(names)]
        # An add by itself is not quantized.
        return build_without(self.run, names, self.model) if any(self.shares[unit] for unit in left) else None

    def _calibrated(self) -> nn.Module:
        """The model to analyse, kept so that a run that goes on has the same amax bit for bit."""
        run, file = self.run, self.options.file
        claim(self.folder, {**run._quant_settings, "file": None if file is None else str(file)}, run.main)
        kept = self.folder / "model.pt"
        if kept.exists():
            return run.load_quantized(kept)
        if file is not None:
            model = run.load_quantized(file)
        else:
            model = run.float_model()
            run.quantize(model)
            run.calibrate(model)
        run.save(model, kept)
        return model

    @property
    def config_file(self) -> Path:
        """Where the proposed configuration is written."""
        return self.folder / "proposed.yaml"

    def all_float(self, proposal: Proposal) -> bool:
        """Whether the proposal leaves nothing quantized."""
        return len(proposal.units) == len(self.units)

    def rank(self) -> Ranking:
        """One evaluation a layer or block, by switching its quantizers."""
        options = self.options
        if options.metric in ("sqnr_db", "kl"):
            score = OutputScore(self.model, self.run.data.calibration, options.score_batches)
            settings = {"batches": options.score_batches}
            found = Evaluations(self.model, score, self.folder / "scores.json", settings)
        else:
            found = Evaluations(self.model, self.run.evaluate, self.folder / "switched.json")
        return rank_sensitivity(
            found,
            options.metric,
            mode=options.mode,
            level=options.level,
            lower_is_better=options.metric in LOWER,
            progress=self.run.main,
        )

    def propose(self, ranking: Ranking) -> Proposal:
        """The fewest float layers within `drop` points of float, with quantizers placed anew at each step."""
        found = self.configurations
        target = number(found.of(found.units)["top1"]) - self.options.drop
        return propose(found, ranking, "top1", target, whole=self.options.whole, progress=self.run.main)

    def check(self, proposal: Proposal) -> Metrics | None:
        """PTQ with the proposed configuration, from the float model on; None where a given file was analysed.

        None too where nothing is left to quantize.
        """
        if self.options.file is not None or self.all_float(proposal):
            return None
        return verify(mixed_config(self.run.config, proposal.members))

    def save(self, ranking: Ranking, proposal: Proposal, checked: Metrics | None) -> dict[str, Any]:
        """Write sensitivity.json, the configuration and the pictures; returns the JSON's content."""
        points = pareto(self.configurations, self.shares, "top1")
        config = self.run.config
        results: dict[str, Any] = {
            "config": to_plain(config),
            "options": to_plain(self.options),
            "environment": environment(),
            "ranking": ranking.to_dict(),
            "proposal": {**proposal.to_dict(), "coverage": self.coverage(proposal.units), "checked": checked},
            "float_top1": self.configurations.of(self.units)["top1"],
            "int8_top1": self.configurations.of(())["top1"],
            "shares": {unit.name: share for unit, share in self.shares.items()},
            "pareto": [_point(point) for point in points],
        }
        path = self.config_file
        why = f"{config.folder.name} with {len(proposal.members)} layers and operations left float (sensitivity.py)."
        if not self.all_float(proposal):
            write_config(mixed_config(config, proposal.members), path, why)
        save_png(sensitivity_of(results), self.folder / "sensitivity.png")
        save_png(pareto_of(results), self.folder / "pareto.png")
        if self.options.engines:
            choices = spread(points, self.options.engines)
            results["engines"] = engine_points(self.run, self.model, choices, self.folder / "engines")
        write_json(self.folder / "sensitivity.json", results)
        return results

    def coverage(self, units: tuple[Unit, ...]) -> float:
        """Percent of the multiply-accumulates in INT8 with these units float."""
        return sum(share for unit, share in self.shares.items() if unit not in units)


def number(value: float | None) -> float:
    """The value; ConfigError where a metric is not finite."""
    if value is None:
        raise ConfigError("top1 of the float model is not finite. Check the checkpoint and the data.")
    return value


def _point(point: Point) -> dict[str, Any]:
    return {
        "float": list(members(point.units)),
        "coverage": point.coverage,
        "value": point.value,
        "best": point.best,
    }


def sensitivity_of(results: dict[str, Any], most: int = 80) -> Any:
    """The bars of a sensitivity.json, the first `most`."""
    ranking, chosen = results["ranking"], set(results["proposal"]["float"])
    rows = ranking["rows"][:most]
    marked = {row["name"] for row in rows if chosen & set(row["members"])}
    what = "gain from leaving it float" if ranking["mode"] == "leave_one_out" else "loss from quantizing it alone"
    label = f"{what}, {ranking['metric']}"
    return sensitivity_figure([(row["name"], row["score"]) for row in rows], marked, label)


def pareto_of(results: dict[str, Any]) -> Any:
    """Accuracy against coverage of a sensitivity.json."""
    points = [(p["coverage"], p["value"], p["best"]) for p in results["pareto"]]
    proposal = results["proposal"]
    chosen = (proposal["coverage"], proposal["metrics"]["top1"])
    labels = ("multiply-accumulates in INT8, %", "top-1 %")
    return pareto_figure(points, chosen, results["float_top1"], proposal["target"], labels)


def table(results: dict[str, Any]) -> str:
    """Every layer or block with its score, the metric and its share of the arithmetic."""
    ranking, chosen = results["ranking"], set(results["proposal"]["float"])
    lines = []
    for row in ranking["rows"]:
        share = sum(results["shares"].get(member, 0.0) for member in row["members"])
        score, metric = row["score"], row["metrics"][ranking["metric"]]
        lines.append([
            row["name"],
            str(len(row["members"])),
            "-" if score is None else f"{score:+.4g}",
            "-" if metric is None else f"{metric:.4f}",
            f"{share:.2f}",
            "float" if chosen & set(row["members"]) else "",
        ])  # fmt: skip
    columns = (ranking["level"], "members", "score", ranking["metric"], "% of MACs", "proposed")
    return format_table(f"sensitivity, {ranking['mode']}", columns, lines)


def conclusion(results: dict[str, Any]) -> str:
    """The proposal in a few sentences."""
    proposal = results["proposal"]
    names = proposal["float"]
    text = (
        f"float {results['float_top1']:.2f}, everything quantized {results['int8_top1']:.2f}, target "
        f"{proposal['target']:.2f}.\n"
    )
    if not names:
        return text + "The target is reached without leaving anything float."
    if not proposal["coverage"]:
        return text + "Only the float model reaches the target, so there is nothing to propose: allow a larger drop."
    text += (
        f"Left float: {len(names)} layers and operations: {', '.join(names)}.\nTop-1 "
        f"{proposal['metrics']['top1']:.2f} with {proposal['coverage']:.1f} % of the multiply-accumulates in INT8."
    )
    if proposal["checked"] is not None:
        short = "" if proposal["checked"]["top1"] >= proposal["target"] else " THIS MISSES THE TARGET."
        text += f"\nPTQ from that configuration, quantizers placed anew: {proposal['checked']['top1']:.2f}.{short}"
    return text
