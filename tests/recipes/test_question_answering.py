"""The scripts, run as a user runs them, on a small BERT that learns made-up facts."""

import json
import shutil
import sys
from pathlib import Path

import onnx
import pytest

from qat.errors import ConfigError
from qat.onnx import assert_clean
from recipes.qa_config import QaConfig, QaDataConfig
from tiny_encoder import write_encoder, write_facts

pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
SMALL = [
    "--data.max_length=64",
    "--data.max_query_length=16",
    "--data.doc_stride=8",
    "--data.batch_size=16",
    "--float_train.epochs=4",
    "--float_train.lr=0.003",
    "--float_train.mixed_precision=no",
    "--float_train.tensorboard=false",
    "--qat.epochs=1",
    "--qat.seeds=[0]",
    "--qat.train.lr=0.0005",
    "--qat.train.mixed_precision=no",
    "--qat.train.tensorboard=false",
    "--quant.batches=2",
    "--tensorrt.build=never",
    "--export.threshold=1",
]


def finetune(folder: Path, *args: str) -> int:
    """The exit status of scripts/qa_finetune.py, in this process: importing torch takes longer than the run."""
    import qa_finetune

    given = (f"--data-dir={folder / 'data'}", f"--model.name={folder / 'model'}", f"--output_dir={folder / 'run'}")
    return qa_finetune.main([*SMALL, *given, *args])


def ask(finished: Path, *args: object) -> None:
    """scripts/answer.py."""
    import answer

    answer.main(["--run", str(finished / "run"), *map(str, args)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qa")
    write_facts(folder / "data")
    write_encoder(folder / "model")
    assert finetune(folder) == 0
    return folder


def test_the_full_run_leaves_everything(finished: Path) -> None:
    results = json.loads((finished / "run" / "results.json").read_text())
    assert results["float"]["f1"] > 60, "the float model learned nothing, so nothing was compared"
    assert [entry["variant"] for entry in results["qat"]] == ["QAT", "QAT + distillation"]
    tuned = results["qat"][1]["metrics"]["f1"]
    assert tuned > results["float"]["f1"] - 10
    assert results["onnx"][0]["metrics"]["f1"] == pytest.approx(tuned, abs=1)
    assert results["onnx"][0]["export"]["codes_that_differ"] == 0 and not results["onnx"][0]["export"]["unused"]
    assert len(results["ptq"]) == 4 and len(results["cpu_speed"]) == 2
    assert "qa_outputs" in results["left_float"]
    assert (finished / "run" / "results.json").stat().st_size < 50_000


def test_the_file_is_clean_and_answers_are_written(finished: Path) -> None:
    path = finished / "run" / "qat.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    assert_clean(path)
    inputs = {
        value.name: [d.dim_param for d in value.type.tensor_type.shape.dim] for value in onnx.load(path).graph.input
    }
    assert inputs == {n: ["batch", "sequence"] for n in ("input_ids", "attention_mask", "token_type_ids")}
    predictions = json.loads((finished / "run" / "predictions.json").read_text())
    n_best = json.loads((finished / "run" / "nbest_predictions.json").read_text())
    assert set(predictions) == set(n_best) == {f"2-{number}-{n}" for number in range(12) for n in range(2)}
    assert all(n_best[identity][0]["text"] == text for identity, text in predictions.items())


def test_running_again_reuses_the_training_and_refuses_other_settings(finished: Path) -> None:
    before = (finished / "run" / "float" / "best.pt").stat().st_mtime
    with pytest.raises(ConfigError, match=r"other settings \(seed: 0 -> 3\)"):
        finetune(finished, "--seed=3")
    assert (finished / "run" / "float" / "best.pt").stat().st_mtime == before


PASSAGE = "The mill of Rusk is well known. It was built in 1850 by Eva Brandt, who lived near Rusk."


def test_questions_about_a_new_passage(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(PASSAGE)
    asked = ("--passage-file", tmp_path / "text.txt", "--question", "When was the mill built?")
    ask(finished, *asked, "--n-best=3")
    default = capsys.readouterr().out
    for text in ("probability:", "ms on ONNX Runtime on the CPU", "candidate"):
        assert text in default
    assert "answer:      1850" in default
    ask(finished, *asked, "--file", finished / "run" / "qat_distilled" / "seed0" / "model.pt")
    torch_side = capsys.readouterr().out
    assert "ms on quantized torch on cpu" in torch_side and "answer:      1850" in torch_side
    typed = iter(["Who built the mill of Rusk?", ""])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
    ask(finished, "--passage", PASSAGE)
    assert "answer:      Eva Brandt" in capsys.readouterr().out


def test_a_squad_file_is_answered_as_in_the_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(finished, "--squad", finished / "data" / "dev.json", "--output", tmp_path)
    again = json.loads((tmp_path / "predictions.json").read_text())
    assert again == json.loads((finished / "run" / "predictions.json").read_text())
    results = json.loads((finished / "run" / "results.json").read_text())
    assert f"{results['onnx'][0]['metrics']['f1']:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--passage", "  ", "--question", "Who?"], "the passage is empty"),
        (["--passage", PASSAGE, "--question", "  "], "the question is empty"),
        (["--passage", PASSAGE, "--question", "who " * 17], "has 17 tokens and data.max_query_length is 16"),
        (["--passage-file", "latin.txt"], "is not UTF-8"),
        (["--passage-file", "nowhere.txt"], "cannot be read"),
        (["--passage-file", "empty.txt", "--question", "Who?"], "the passage is empty"),
        (["--passage", PASSAGE, "--question-file", "latin.txt"], "latin.txt is not UTF-8: byte 0 is 0xe9"),
        (["--passage", PASSAGE, "--question-file", "empty.txt"], "empty.txt has no question"),
        (["--squad", "broken.json"], "is not JSON"),
        (["--squad", "latin.txt"], "is not UTF-8"),
        (["--squad", "list.json"], "'data' is missing"),
        (["--squad", "deep.json"], "is not JSON"),
        (["--passage", PASSAGE, "--question", "Who?", "--file", "nothing.onnx"], "there is no file nothing.onnx"),
        (["--passage", PASSAGE, "--question", "Who?", "--data.n_bset=2"], "Did you mean 'data.n_best'"),
    ],
)
def test_wrong_input_gets_a_clear_error(
    args: list[str], message: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        ask(finished, *args)


def test_data_without_answers_needs_the_setting(tmp_path: Path) -> None:
    write_facts(tmp_path / "data", unanswerable=True)
    write_encoder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"questions without an answer. Set data.unanswerable=true"):
        finetune(tmp_path)
    with pytest.raises(ConfigError, match="positions for 96 tokens"):
        finetune(tmp_path, "--data.max_length=200")


def test_unanswerable_questions_are_scored_and_refused(tmp_path: Path) -> None:
    import torch

    from recipes.qa_questions import Questions
    from recipes.transformers_models import build_encoder, load_tokenizer

    write_facts(tmp_path / "data", unanswerable=True)
    folder = str(write_encoder(tmp_path / "model"))
    data = QaDataConfig(dir=tmp_path / "data", unanswerable=True, max_length=64, max_query_length=16, doc_stride=8)
    tokenizer = load_tokenizer(folder)
    names = ("input_ids", "attention_mask", "token_type_ids")
    questions = Questions(QaConfig(data=data), tokenizer, names, torch.device("cpu"))
    model = build_encoder(folder)
    with torch.no_grad():
        model.qa_outputs.weight.zero_()  # every score is the bias, so "no answer" ties with every span
    metrics = questions.evaluate(model)
    assert {"HasAns_f1", "NoAns_f1", "best_f1", "best_threshold"} <= set(metrics)
    assert metrics["best_f1"] >= metrics["f1"]
    never = QaDataConfig(**{**vars(data), "null_threshold": -1.0})
    refused = Questions(QaConfig(data=never), tokenizer, names, torch.device("cpu")).evaluate(model)
    assert refused["NoAns_f1"] == 100.0 and refused["HasAns_f1"] == 0.0
    assert refused["f1"] == pytest.approx(100 / 3)


def test_every_seed_has_its_file_and_the_threshold_is_on_their_mean(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.qa_results import exported_f1

    shutil.copytree(finished, tmp_path / "two")
    arguments = [f"--model.name={finished / 'model'}", "--qat.seeds=[0,1]", f"--data-dir={finished / 'data'}"]
    assert finetune(tmp_path / "two", *arguments) == 0
    results = json.loads((tmp_path / "two" / "run" / "results.json").read_text())
    assert [entry["file"] for entry in results["onnx"]] == ["qat.onnx", "qat_seed1.onnx"]
    assert all((tmp_path / "two" / "run" / entry["file"]).exists() for entry in results["onnx"])
    assert "ONNX Runtime (QAT + distillation) (2 seeds)" in capsys.readouterr().out
    for entry, f1 in zip(results["qat"], (10.0, 20.0, 50.0, 60.0), strict=True):
        entry["metrics"]["f1"] = f1
    for entry, f1 in zip(results["onnx"], (54.0, 57.0), strict=True):
        entry["metrics"]["f1"] = f1
    assert exported_f1(results) == (55.0, 55.5)


def test_configs_are_read() -> None:
    from recipes.qa_config import build_parser, parse

    for name in ("minilm_qa", "bert_squad"):
        config, _ = parse(build_parser(""), ["--config", str(ROOT / "configs" / f"{name}.yaml")])
        assert config.qat.distill.active and config.float_train.metric == config.qat.train.metric == "f1"


def test_engine_sequences_are_no_longer_than_windows() -> None:
    from recipes.qa_results import profiles

    config = QaConfig(data=QaDataConfig(max_length=256))
    assert config.engine_lengths == [128, 256]
    shapes = [profile["input_ids"].max for profile in profiles(config, ["input_ids"])]
    assert shapes == [(1, 128), (32, 128), (1, 256), (32, 256)]
