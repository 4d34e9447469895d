"""docs/segmentation.md: its commands are ones that the scripts take, its code runs, and what it names exists."""

import re
import shlex
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from recipes.config import build_parser
from recipes.segmentation_config import SEGMENTATION_SHORT_NAMES, SegmentationConfig, parse_segmentation

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "segmentation.md").read_text()
COMMANDS = re.findall(r"^    \.venv/bin/python scripts/(.+)$", GUIDE.replace("\\\n", " "), re.MULTILINE)
PYTHON = re.findall(r"```python\n(.+?)```", GUIDE, re.DOTALL)


def config_of(arguments: list[str]) -> SegmentationConfig:
    parser = build_parser("", SegmentationConfig, SEGMENTATION_SHORT_NAMES)
    return parse_segmentation(parser, arguments)[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *arguments = shlex.split(command, comments=True)
    assert (ROOT / "scripts" / script).is_file()
    if script == "segmentation.py":
        monkeypatch.chdir(ROOT)
        assert config_of(arguments).seeds


def test_the_engine_that_the_guide_inspects_is_the_one_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = config_of(["--config", "configs/digits_unet.yaml"]).folder
    (inspect,) = (command for command in COMMANDS if command.startswith("inspect_engine.py"))
    assert f"--engine {folder}/qat.fp16.engine" in inspect and f"--onnx {folder}/qat.fp16.onnx" in inspect


def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a file that gives the brightness of each pixel in the place of the trained one."""
    (code,) = PYTHON
    file = tmp_path / "runs" / "digits_unet_resnet18" / "qat.onnx"
    file.parent.mkdir(parents=True)
    shape = ["batch", 3, "height", "width"]
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "output"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["output"])], "same", [given], [made])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), file)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "segmentation.md", "exec"), names)
    torch.testing.assert_close(names["logits"], names["images"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["digits_unet", "membrane_unet"])
def test_configs_give_what_their_first_lines_say(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    assert f"--config configs/{name}.yaml" in path.read_text().splitlines()[1]
    config = config_of(["--config", str(path), "--data_dir", "somewhere"])
    assert config.data.dir == Path("somewhere")
    assert config.float_train.metric == config.qat.train.metric == "dice"
    assert len(config.quant.all_methods()) == 4
    first = config.for_seed(config.seeds[0])
    assert first.folder == config.folder / f"seed{config.seeds[0]}" and first.qat.seeds == (config.seeds[0],)
