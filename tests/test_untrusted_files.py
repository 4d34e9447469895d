"""Files from strangers: checkpoints, ONNX files, configurations, and names on their way into a page."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import qat
from qat.errors import ConfigError, DescriptorError, QatError
from qat.onnx import fix, lint
from qat.onnx.modelfile import read_proto
from qat.report.page import Section, Table, render_page
from qat.runtime import OnnxRuntimeRunner
from qat.state_dict import read_checkpoint
from qat.tensorrt import Layer, OnnxGraph, inspect_layers
from qat.tensorrt.layers import LayerTensor
from qat.tensorrt.page import render_page as render_engine_page
from qat.tensorrt.store import hash_onnx
from qat.training.checkpoint import load_checkpoint
from recipes.config import build_parser, parse

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("qat", "recipes", "scripts") for path in (ROOT / folder).rglob("*.py")]
HOSTILE = "<script>alert(1)</script>&\"'"


class Evil:
    """Pickled, it creates a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("read", [read_checkpoint, load_checkpoint])
def test_a_checkpoint_cannot_run_code(read: Callable[[Path], Any], tmp_path: Path) -> None:
    torch.save({"format": 1, "weight": torch.ones(1), "other": Evil(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_no_eval_no_pickle_and_weights_only_everywhere() -> None:
    assert len(SOURCES) > 150
    refused = {"eval", "exec", "pickle.load", "pickle.loads", "dill.load", "joblib.load", "np.load", "numpy.load"}
    for path in SOURCES:
        for name, call in _calls(ast.parse(path.read_text())):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if name in ("np.load", "numpy.load"):
                assert given.get("allow_pickle", "False") == "False", f"{path}:{call.lineno}"
                continue
            assert name not in refused, f"{path}:{call.lineno} calls {name}"
            if name in ("torch.load", "torch.hub.load_state_dict_from_url"):
                assert given.get("weights_only") == "True", f"{path}:{call.lineno}"
            if name.startswith("yaml."):
                assert name in ("yaml.safe_load", "yaml.safe_dump"), f"{path}:{call.lineno}"
            if name.endswith("jinja2.Environment"):
                assert given.get("autoescape") == "True", f"{path}:{call.lineno}"


def _external_model(folder: Path, location: str, in_attribute: bool = False) -> Path:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8, 8], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if in_attribute:
        constant = helper.make_node("Constant", [], ["w"])
        constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(weight)
        nodes.insert(0, constant)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [] if in_attribute else [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model's data inside it, and a secret beside it, to which two links lead."""
    inside = tmp_path / "inside"
    inside.mkdir()
    data = np.arange(64, dtype=np.float32).tobytes()
    (inside / "ok.bin").write_bytes(data)
    (tmp_path / "secret.bin").write_bytes(data)
    (inside / "link.bin").symlink_to(tmp_path / "secret.bin")
    (inside / "up").symlink_to(tmp_path)
    return inside


READERS: dict[str, Callable[[Path], Any]] = {
    "read": read_proto,
    "lint": lint,
    "fix": lambda path: fix(path, path.with_name("fixed.onnx")),
    "hash": hash_onnx,
    "inspect": OnnxGraph.load,
    "run": lambda path: OnnxRuntimeRunner(path).run({"x": np.ones((2, 8), np.float32)}),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("in_attribute", [False, True])
def test_onnx_external_data_cannot_escape_its_folder(reader: str, in_attribute: bool, folder: Path) -> None:
    READERS[reader](_external_model(folder, "ok.bin", in_attribute))
    absolute = str(folder.parent / "secret.bin")
    for location in ("../secret.bin", "link.bin", "up/secret.bin", "x/../../secret.bin", absolute, "/etc/passwd"):
        path = _external_model(folder, location, in_attribute)
        with pytest.raises(QatError) as error:
            READERS[reader](path)
        if reader != "run":  # ONNX Runtime refuses in its own words
            assert "outside its folder" in str(error.value) and location in str(error.value)
    assert not folder.with_name("fixed.onnx").exists()


def test_tensorrt_never_sees_escaping_external_data(folder: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    from qat.tensorrt import BuildOptions, build_engine, load_library

    options, library = BuildOptions(compute_capabilities=("8.9",)), load_library("tensorrt_rtx")
    assert build_engine(_external_model(folder, "ok.bin"), options, library=library).engine
    with pytest.raises(QatError, match="outside its folder"):
        build_engine(_external_model(folder, "../secret.bin"), options, library=library)


def test_a_model_without_a_file_has_no_external_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    data = _external_model(folder, "ok.bin").read_bytes()
    for model in (data, onnx.ModelProto.FromString(data)):
        with pytest.raises(QatError, match="give the path"):
            lint(model)


@pytest.mark.parametrize("scopes", ["__import__('os').mkdir('ran')", "(" * 5000, "5", "{'a': 1}", "['', 'layer', 'x']"])
def test_onnx_metadata_is_not_evaluated(scopes: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = _external_model(folder, "ok.bin")
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].name = "a/b"
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    path.write_bytes(model.SerializeToString())
    layer = Layer("conv", "gemm", constants=(LayerTensor("w", "fp32", (8, 8)),), onnx_nodes=("a/b",))
    inspection = inspect_layers([layer], OnnxGraph.load(path))
    assert [op.module for op in inspection.operations] == ["layer" if scopes[0] == "[" else "a"]
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "seed: !!python/object/apply:os.mkdir [ran]",
        "model: !!python/object/new:os.mkdir [ran]",
        "model:\n  class_path: os.mkdir\n  init_args: {path: ran}",
        "model: {name: !!python/name:os.mkdir }",
    ],
)
def test_a_configuration_cannot_run_code(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.yaml").write_text(text)
    with pytest.raises(ConfigError):
        parse(build_parser(""), ["--config", "evil.yaml"])
    with pytest.raises(DescriptorError):
        qat.QuantDescriptor.from_yaml(text)
    assert not Path("ran").exists()


def test_reports_escape_names() -> None:
    table = Table([HOSTILE], [[HOSTILE]], HOSTILE)
    page = render_page(HOSTILE, HOSTILE, [Section(HOSTILE, [HOSTILE], [], [table], HOSTILE)])
    assert "<script>alert" not in page and page.count("&lt;script&gt;") >= 7
    tensor = LayerTensor(HOSTILE, "fp32", (8, 8))
    layer = Layer(HOSTILE, "gemm", (tensor,), (tensor,), (tensor,), (HOSTILE,), HOSTILE)
    page = render_engine_page(inspect_layers([layer]), HOSTILE)
    assert "<script>alert" not in page and "&lt;script&gt;" in page


def test_figures_escape_names() -> None:
    from qat.report.figures import new_figure, shortened, to_svg

    figure = new_figure(4, 3)
    figure.subplots().set_title(shortened(HOSTILE + "$\\bad$"))
    svg = to_svg(figure)
    assert "<script>" not in svg and "&lt;script&gt;" in svg
