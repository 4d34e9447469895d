from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import GraphWriter, residual
from lint_cases import BAD, GOOD, MORE_BAD
from onnx_models import Residual, Upsample, calibrated, inputs_for

from qat.errors import ExportError
from qat.onnx import export
from qat.onnx.lint import RULES, Issue, Rule, Severity, assert_clean, lint
from qat.onnx.typing import to_fp16

SCRIPT = Path(__file__).parents[2] / "scripts" / "lint.py"
CASES = [*BAD.items(), *MORE_BAD]
ALONG = {
    "zero-point-nonzero": {"code-type"},
    "code-type": {"zero-point-nonzero"},
}
"""Rules that may speak too, since the smallest bad file breaks them as well."""


def test_every_rule_has_a_bad_file() -> None:
    assert set(BAD) == set(RULES)
    assert all(rule.summary and rule.name == name for name, rule in RULES.items())


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(CASES)])
def test_a_bad_file_is_found_and_its_node_named(name: str, case: Any) -> None:
    model, node = case()
    report = lint(model)
    found = report.of_rule(name)
    assert [finding.node for finding in found][:1] == [node], str(report)
    assert "TensorRT" in found[0].why or "NVIDIA" in found[0].why or name in {"opset", "one-sided", "requantize"}
    assert found[0].fix.endswith(".") and found[0].why.endswith(".")
    others = {finding.rule for finding in report.at_least(Severity.WARNING)} - {name}
    assert others <= ALONG.get(name, set()), str(report)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_has_no_warning_also_in_half_precision(name: str) -> None:
    model = GOOD[name]()
    onnx.checker.check_model(model, full_check=True)
    assert_clean(model)
    half = to_fp16(model).model
    assert not assert_clean(half).of_rule("float-remainder")


@pytest.mark.parametrize("model_class", [Residual, Upsample])
@pytest.mark.parametrize("int8_weights", [True, False])
def test_our_own_exports_are_clean(tmp_path: Path, model_class: Any, int8_weights: bool) -> None:
    model = calibrated(model_class())
    report = export(model, inputs_for(model), tmp_path / "m.onnx", int8_weights=int8_weights, verify=False)
    assert lint(report.path).path == str(report.path)
    assert_clean(report.path)
    assert_clean(to_fp16(report.path).model)


def test_intended_float_layers_are_only_mentioned() -> None:
    for name in ("squeeze", "small island", "small depthwise island"):
        (finding,) = lint(GOOD[name]()).of_rule("float-island")
        assert finding.severity is Severity.INFO and finding.node == "middle"


def test_findings_inside_control_flow() -> None:
    w = GraphWriter()
    w.conv(w.qdq("x", "q", scale=-1.0), "inner")
    body = w.model("inner").graph
    body.ClearField("input")
    outer = GraphWriter()
    condition = outer.constant("condition", True)
    outer.add("If", [condition], "y", then_branch=body, else_branch=body)
    assert {finding.node for finding in lint(outer.model("y")).of_rule("scale-value")} == {"q/QuantizeLinear"}


def test_rules_are_chosen_added_and_unknown_ones_refused() -> None:
    model, _ = BAD["zero-point-nonzero"]()
    assert {finding.rule for finding in lint(model, rules=["code-type"]).findings} == set()
    own = Rule("no-conv", Severity.ERROR, "own", lambda graph: [Issue("", "there is a Conv.", "Remove it.")])
    assert [finding.rule for finding in lint(model, rules=[own, "zero-point-nonzero"]).findings] == [
        "no-conv",
        "zero-point-nonzero",
    ]
    with pytest.raises(ValueError, match="no rule 'zero'"):
        lint(model, rules=["zero"])
    with pytest.raises(ValueError, match="severity 'bad'"):
        Severity.of("bad")


def test_assert_clean_names_what_it_found() -> None:
    with pytest.raises(AssertionError, match="residual-both: 'add'"):
        assert_clean(residual(("identity", "branch")))
    assert_clean(residual(("identity", "branch")), allow=["residual-both"])
    assert_clean(residual(("identity", "branch")), severity=Severity.ERROR)
    with pytest.raises(AssertionError, match="float-remainder"):
        assert_clean(residual(), severity=Severity.INFO)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"not onnx")
    for model, why in (
        (bad, "not an ONNX file"),
        (tmp_path / "none.onnx", "there is no"),
        (3, "int"),
        (b"", "outputs"),
    ):
        with pytest.raises(ExportError, match=why):
            lint(model)


def test_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    main = runpy.run_path(str(SCRIPT), run_name="script")["main"]
    bad, fixed = str(tmp_path / "bad.onnx"), str(tmp_path / "fixed.onnx")
    onnx.save(BAD["bias-quantized"]()[0], bad)
    assert main([bad]) == 1
    assert "error   bias-quantized: 'bias/DequantizeLinear'" in capsys.readouterr().out
    assert main([bad, "--ignore", "bias-quantized"]) == 0
    capsys.readouterr()
    assert main([bad, "--fix", fixed, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"] == {"info": 1} and len(report["changes"]) == 1
    assert main([fixed, "--severity", "info"]) == 1


def test_script_says_an_unreadable_file_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "none.onnx")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
