from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from qat.errors import ConfigError, QatError
from recipes import qa_config, segmentation_config
from recipes.config import DataConfig, RunConfig, build_parser, known_keys, parse, to_plain
from recipes.results import name_of
from recipes.stages import claim, differences

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def load(*args: str) -> RunConfig:
    return parse(build_parser("test"), args)[0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_says_what_it_is_for(path: Path) -> None:
    args = ["--config", str(path)]
    if "scripts/segmentation.py" in path.read_text():
        parser = build_parser("test", segmentation_config.SegmentationConfig)
        config = segmentation_config.parse_segmentation(parser, args)[0]
    elif "scripts/qa_finetune.py" in path.read_text():
        config = qa_config.parse(qa_config.build_parser("test"), args)[0]
    else:
        config = load(*args)
    assert config.model.name in path.read_text()
    first = path.read_text().splitlines()[:6]
    for word in ("Run:", "Expected:", "Cost:"):
        assert any(word in line for line in first), f"{path.name} does not state {word}"
    assert f"--config configs/{path.name}" in "\n".join(first)


def test_there_are_the_promised_configs() -> None:
    names = {path.stem for path in CONFIGS}
    for model in ("efficientnet", "resnet50", "mobilenet_v2"):
        assert {model, f"cifar10_{model}"} <= names
    assert "digits" in names


def test_command_line_overrides_the_file() -> None:
    path = str(ROOT / "configs" / "digits.yaml")
    config = load("--config", path, "--qat.train.lr", "0.5", "--calibrator=max", "--data.batch_size", "7")
    assert config.qat.train.lr == 0.5
    assert config.quant.calibrator == "max"
    assert config.quant.all_methods() == ("max",)
    assert config.data.batch_size == 7
    assert config.float_train.optimizer == "adamw"


def test_defaults_need_nothing_else() -> None:
    config = load("--calibrator", "histogram")
    assert config.data.name == "digits"
    assert config.quant.all_methods() == ("max", "entropy", "mse", "percentile=99.9", "percentile=99.99")
    assert config == load("--config", str(ROOT / "configs" / "digits.yaml"), "--quant.calibrator", "histogram")
    assert config.folder == Path("runs/digits_efficientnet_b0")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--calibratr", "max"], ["calibratr", "calibrator"]),
        (["--data.batchsize", "3"], ["data.batchsize", "data.batch_size"]),
        (["--data.batch_size", "many"], ["batch_size", "many"]),
        (["--data.batch_size", "0"], ["batch_size=0", "1 or more"]),
        (["--data.name", "imagefolder"], ["data.dir", "--data-dir"]),
        (["--quant.methods", "[kl]"], ["'kl'", "entropy"]),
        (["--qat.train.optimizer", "adam"], ["optimizer", "adam"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
)
def test_bad_arguments_are_explained(args: list[str], parts: list[str]) -> None:
    with pytest.raises(QatError) as error:
        load(*args)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("data: {batchsize: 3}", ["batchsize", "data.batch_size"]),
        ("qaat: {share: 1}", ["qaat", "qat"]),
        ("quant: {per_channel: perhaps}", ["per_channel", "perhaps"]),
        ("data: [1, 2]", ["not a mapping"]),
        ("a: b: c", ["config"]),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load("--config", str(path))
    for part in parts:
        assert part in str(error.value)


def test_resolved_config_can_be_run_again(tmp_path: Path) -> None:
    config = load("--config", str(ROOT / "configs" / "cifar10_resnet50.yaml"), "--output_dir", str(tmp_path))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_plain(config)))
    assert load("--config", str(path)) == config


def test_known_keys_are_dotted() -> None:
    assert {"seed", "data.batch_size", "qat.train.lr"} <= set(known_keys())


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    plain = to_plain(RunConfig())
    claim(tmp_path, plain, write=True)
    claim(tmp_path, plain, write=True)
    other = to_plain(replace(RunConfig(), seed=4))
    with pytest.raises(ConfigError, match=r"other settings \(seed: 0 -> 4\)"):
        claim(tmp_path, other, write=True)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        claim(tmp_path, plain, write=True)
    assert differences({"a": {"b": 1}}, {"a": {"b": 2}}) == ["a.b: 1 -> 2"]


def test_a_file_is_named_after_data_and_network(tmp_path: Path) -> None:
    images = DataConfig(name="imagefolder", dir=tmp_path / "cifar10")
    assert name_of(RunConfig(data=images)) == "cifar10_efficientnet_b0"
    assert name_of(RunConfig()) == "digits_efficientnet_b0"
