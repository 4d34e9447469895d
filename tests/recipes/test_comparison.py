"""The comparison, run as a user runs it on a small network and real digits, and its parts on made-up numbers."""

import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import qat
from qat.errors import ConfigError, EngineError, RunnerError
from qat.runtime import OnnxRuntimeRunner
from qat.runtime.latency import summarize
from qat.tensorrt import EngineTiming, Inspection, Operation, load_library
from recipes import comparison
from recipes.candidates import Candidate, candidates, names
from recipes.cells import FP16, FP32, ORT, TENSORRT, TORCH, Cell, Measuring, finite
from recipes.classification import Classification
from recipes.comparison import Comparison
from recipes.comparison_page import all_times, render_page
from recipes.comparison_plot import panels
from recipes.comparison_table import make_table, problems, speed_warnings
from recipes.config import ExportConfig, RunConfig, TensorRTConfig, build_parser, parse

ROOT = Path(__file__).parents[2]
SMALL = [
    "--model.name=resnet18",
    "--data.image_size=32",
    "--data.batch_size=128",
    "--data.eval_batch_size=64",
    "--float_train.epochs=2",
    "--float_train.lr=0.002",
    "--qat.epochs=1",
    "--quant.batches=1",
    "--quant.calibrator=max",
    "--export.threshold=5",
    "--tensorrt.library=tensorrt_rtx",
]
MODELS = ["FP32", "FP16", "PTQ max", "QAT seed 0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The folder and the output of a whole run from nothing."""
    folder = tmp_path_factory.mktemp("comparison") / "run"
    command = [sys.executable, str(ROOT / "scripts/compare.py"), *SMALL, f"--output_dir={folder}"]
    command += ["--batches=[1,4]", "--iterations=3", "--seconds=0.2"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, check=False, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:] + run.stdout[-3000:]
    return folder / "compare", run.stdout


@pytest.mark.slow
def test_every_cell_is_filled_or_says_why(finished) -> None:
    results = json.loads((finished[0] / "compare.json").read_text())
    cells = [Cell(**values) for values in results["cells"]]
    assert [(c.model, c.backend) for c in cells] == [(m, b) for m in MODELS for b in (TORCH, ORT, TENSORRT)]
    for cell in cells:
        assert cell.bytes and cell.bytes > 1000
        if cell.backend != TENSORRT:
            assert not cell.why and set(cell.latency) == {"1", "4"} and 0 < cell.metrics["top1"] <= 100
            assert cell.latency["4"]["batch"] == 4 and cell.latency["4"]["throughput"] > 0
        elif "execution" in cell.why:
            assert cell.metrics is None and not cell.latency and len(cell.why["execution"]) > 10
    assert results["environment"]["packages"]["torch"] and results["config"]["model"]["name"] == "resnet18"


@pytest.mark.slow
def test_backends_agree_and_files_shrink(finished) -> None:
    cells = {(c["model"], c["backend"]): c for c in json.loads((finished[0] / "compare.json").read_text())["cells"]}
    for model in MODELS:
        assert abs(cells[model, TORCH]["metrics"]["top1"] - cells[model, ORT]["metrics"]["top1"]) < 5
        assert cells[model, TORCH]["sha256"] == cells[model, ORT]["sha256"] != ""
    assert len({cells[model, ORT]["sha256"] for model in MODELS}) == len(MODELS)
    size = {model: cells[model, ORT]["bytes"] for model in MODELS}
    assert 1.9 < size["FP32"] / size["FP16"] < 2.1
    assert 3 < size["FP32"] / size["QAT seed 0"] < 4.1


@pytest.mark.slow
def test_engine_size_and_coverage_need_no_gpu(finished) -> None:
    try:
        load_library("tensorrt_rtx")
    except EngineError as error:
        pytest.skip(f"needs tensorrt_rtx: {error}")
    cells = {c["model"]: c for c in json.loads((finished[0] / "compare.json").read_text())["cells"] if c["engine"]}
    assert list(cells) == MODELS
    covered = {model: cells[model]["engine"]["int8_layers"] for model in MODELS}
    assert covered["FP32"] == covered["FP16"] == 0
    assert covered["PTQ max"] == covered["QAT seed 0"] >= 19  # of 21: the logits and the stem may stay float
    for cell in cells.values():
        assert cell["engine"]["engine_bytes"] == (finished[0] / cell["engine"]["engine"]).stat().st_size
    assert f"{covered['PTQ max']}/21" in finished[1]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.found += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data") and value]


@pytest.mark.slow
def test_the_page_needs_no_network(finished) -> None:
    text = (finished[0] / "compare.html").read_text()
    page = _Links()
    page.feed(text)
    assert all(link.startswith("#") for link in page.found)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert page.tags.count("svg") == 1 and page.tags.count("tr") > 20
    for model in MODELS:
        assert model in text


@pytest.mark.slow
def test_a_second_run_takes_over_whole_cells(finished) -> None:
    config, _ = parse(build_parser(""), [*SMALL, f"--output_dir={finished[0].parent}"])
    run = Classification(config)
    same = Comparison(run, Measuring((1, 4), 3, 0.2))
    stored = json.loads(same.path.read_text())
    same.header |= {key: stored[key] for key in ("torch_threads", "environment")}  # the checkout may change meanwhile
    assert set(same._finished_before()) == {
        (c["model"], c["backend"], c["sha256"]) for c in stored["cells"] if c["backend"] != TENSORRT
    }
    assert not Comparison(run, Measuring((1, 4), 4, 0.2))._finished_before()
    before = same.path.read_text()
    try:
        same.path.write_text("{")
        assert not same._finished_before()
    finally:
        same.path.write_text(before)
    modified = (finished[0].parent / "float" / "best.pt").stat().st_mtime
    assert next(candidates(run)).name == FP32
    assert (finished[0].parent / "float" / "best.pt").stat().st_mtime == modified


def test_names_follow_the_configuration() -> None:
    config, _ = parse(build_parser(""), ["--quant.percentiles=[99.9]", "--qat.seeds=[3,4]"])
    assert names(config) == [FP32, FP16, "PTQ max", "PTQ entropy", "PTQ mse", "PTQ percentile=99.9", "QAT seed 3"]


def test_measuring_refuses_nonsense() -> None:
    for values in ({"batches": ()}, {"batches": (0,)}, {"batches": (1,), "iterations": 0}):
        with pytest.raises(ConfigError, match="--batches"):
            Measuring(**values)


def test_nan_logits_are_no_accuracy() -> None:
    assert finite({"top1": 1.0, "val_loss": 2.0})
    with pytest.raises(RunnerError, match="NaN"):
        finite({"top1": 10.0, "val_loss": float("nan")})


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A comparison without training or TensorRT: bench(latencies in ms by file) -> measured TensorRT cells by model."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    qat.export(model, (torch.randn(2, 3, 32, 32),), tmp_path / "m.onnx")
    config = RunConfig(output_dir=tmp_path / "run", tensorrt=TensorRTConfig(build="never"))
    run = SimpleNamespace(config=config, device=torch.device("cpu"), evaluate_runner=lambda r: {"top1": 50.0})
    subject = Comparison(run, Measuring((1, 2), 3, 0.1))
    subject.library = SimpleNamespace(name="stand-in")
    operation = Operation("conv1/Conv", "Conv", "conv1", "fp16", ("l",), cause="input has no QuantizeLinear")
    inspection = Inspection((), (operation,), (), ())

    def built(config, library, file):
        stored = SimpleNamespace(path=file)
        return SimpleNamespace(
            stored=stored, library=library, inspection=inspection, why_not_run="", to_dict=lambda: {"engine": file.name}
        )

    def measure(times_ms: dict[str, float], graph_ms: dict[str, float] | None = None) -> list[Cell]:
        current = ""

        def timing(loaded, inputs, iterations):
            batch = len(next(iter(inputs.values())))
            plain = summarize([times_ms[current]], batch)
            graph = summarize([graph_ms[current]], batch) if graph_ms else None
            return EngineTiming(plain, plain, graph, None)

        monkeypatch.setattr(comparison, "build_for", built)
        monkeypatch.setattr(comparison, "load_engine", lambda path, library: path)
        monkeypatch.setattr(comparison, "TensorRTRunner", OnnxRuntimeRunner)
        monkeypatch.setattr(comparison, "measure_engine", timing)
        for current in times_ms:
            cell = Cell(current, TENSORRT)
            files = {ORT: tmp_path / "m.onnx", TENSORRT: tmp_path / "m.onnx"}
            subject._tensorrt(Candidate(current, model, files), cell)
            subject.cells.append(cell)
        return subject

    return measure


def test_an_engine_that_runs_is_measured(bench) -> None:
    (cell,) = bench({"QAT": 2.0}).cells
    assert not cell.why and cell.metrics == {"top1": 50.0}
    assert cell.latency["2"]["median_ms"] == 2.0 and cell.latency["2"]["throughput"] == pytest.approx(1000)
    assert [row[2:3] for row in all_times([cell])] == [("execution",), ("with copies",)] * 2


def test_slow_int8_is_warned_of_with_layers(bench) -> None:
    subject = bench({FP16: 2.0, "PTQ max": 3.0, "QAT": 1.0})
    warnings = speed_warnings(subject.cells, subject.inspections)
    assert len(warnings) == 2 and all(w.startswith("PTQ max, batch") for w in warnings)
    assert "INT8 takes 3.000 ms and FP16 2.000 ms" in warnings[0]
    assert "conv1/Conv (Conv, module conv1) is fp16: input has no QuantizeLinear" in warnings[0]


def test_launches_that_hide_int8_are_named(bench) -> None:
    subject = bench({FP16: 2.0, "QAT": 2.0}, {FP16: 1.0, "QAT": 0.5})
    warnings = speed_warnings(subject.cells, subject.inspections)
    assert len(warnings) == 2 and "As CUDA graphs INT8 takes 0.500 ms and FP16 1.000 ms" in warnings[0]


def test_without_times_nobody_claims_that_int8_is_fast() -> None:
    cells = [Cell(FP16, TENSORRT, why={"execution": "no GPU"}), Cell("QAT", TENSORRT)]
    (warning,) = speed_warnings(cells, {})
    assert "not known" in warning and "no GPU" in warning


def _cell(model: str, backend: str, top1: float, **more) -> Cell:
    return Cell(model, backend, "a", 2**20, {"top1": top1, "top5": 100.0, "val_loss": 0.1}, **more)


def test_a_file_worse_than_its_model_is_a_problem() -> None:
    cells = [_cell("QAT", TORCH, 90.0), _cell("QAT", ORT, 89.0), _cell("QAT", TENSORRT, 88.0), _cell(FP32, ORT, 1.0)]
    config = RunConfig(export=ExportConfig(threshold=1.5))
    assert problems(cells, config) == [
        "QAT on TensorRT is 2.00 points below torch; 1.5 are allowed (export.threshold)."
    ]
    config = RunConfig(export=ExportConfig(threshold=0.5, eval_images=10))
    assert [p.split(" is")[0] for p in problems(cells, config)] == ["QAT on TensorRT"]


def test_too_little_int8_is_a_problem_of_int8_models_only() -> None:
    cells = [
        Cell(m, TENSORRT, engine={"int8_coverage_percent": p}) for m, p in ((FP16, 0.0), ("PTQ", 40.0), ("Q", 50.0))
    ]
    config = RunConfig(tensorrt=TensorRTConfig(min_int8=50.0))
    assert problems(cells, config) == ["PTQ: 40.0 % of the layers are INT8; tensorrt.min_int8 is 50."]
    assert not problems(cells, RunConfig())


def test_an_error_in_one_part_leaves_the_others() -> None:
    cell = Cell("QAT", ORT)
    with cell.part("accuracy"):
        raise EngineError("first line\nsecond line")
    with cell.part("execution"):
        raise MemoryError
    assert cell.why == {"accuracy": "first line second line", "execution": "MemoryError()"}
    with pytest.raises(KeyError), cell.part("a bug"):
        raise KeyError("x")


def _table_cells() -> list[Cell]:
    time = summarize([2.0], 4).to_dict()
    engine = {"engine_bytes": 2**21, "int8_layers": 3, "weighted_layers": 4, "int8_coverage_percent": 75.0}
    engine |= {"not_int8": [dataclasses.asdict(Operation("<n>", "Conv", "m", "fp16", ()))], "engine": "e.engine"}
    return [
        _cell(FP32, TORCH, 90.0, latency={"1": time, "4": time}),
        _cell("PTQ $x$ <b>", TORCH, 88.0, latency={"1": time}, why={"batch 4": "out of memory"}),
        Cell("PTQ $x$ <b>", ORT, why={"file": "not exported"}),
        Cell("PTQ $x$ <b>", TENSORRT, bytes=2**20, engine=engine, why={"execution": "no <GPU>"}),
    ]


def test_the_table_numbers_its_reasons() -> None:
    table = make_table(_table_cells(), (4, 1, 2))
    assert table.columns[4:7] == ("ms, batch 1", "ms, batch 4", "samples/s, batch 4")
    assert table.rows[0][2:8] == ("90.00", "+0.00", "2.00", "2.00", "2000.00", "1.00")
    assert table.rows[1][2:7] == ("88.00", "-2.00", "2.00", "- [1]", "- [1]")
    assert table.rows[2][2:] == ("- [2]", "-", "- [2]", "- [2]", "- [2]", "- [2]", "", "")
    assert table.rows[3][2:] == ("- [3]", "-", "- [3]", "- [3]", "- [3]", "1.00", "2.00", "3/4 = 75.0 %")
    assert table.reasons == ("out of memory", "not exported", "no <GPU>")
    assert "[2] not exported" in table.text("t")


def test_the_page_escapes_names_and_lists_what_is_float() -> None:
    cells = _table_cells()
    environment = {"cpu": "c", "cores": 1, "gpu": ["g"], "packages": {"torch": "2"}, "python": "3", "commit": "x"}
    header = {"environment": environment | {"date": "d"}, "device": "cpu", "config": {"a": 1}}
    header["measuring"] = {"batches": [1, 4]}
    text = render_page(cells, make_table(cells, (1, 4)), header, "title", ["<w>"], ["<p>"])
    assert "&lt;b&gt;" in text and "<b>" not in text.replace("<b>Warning:</b>", "").replace("<b>Failed:</b>", "")
    assert "no &lt;GPU&gt;" in text and "&lt;n&gt;" in text and "e.engine" in text


def test_pictures_show_only_what_was_measured() -> None:
    drawn = panels(_table_cells(), (1, 4))
    latency = next(series for title, series in drawn.items() if "batch 1" in title)
    assert latency[TORCH] == {FP32: 2.0, "PTQ $x$ <b>": 2.0} and latency[TENSORRT] == {"PTQ $x$ <b>": None}
    assert drawn["weighted layers in INT8, %"] == {TENSORRT: {"PTQ $x$ <b>": 75.0}}
