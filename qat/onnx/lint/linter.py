"""Running the rules over a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qat.onnx.lint.findings import Finding, LintReport, Rule, Severity
from qat.onnx.lint.graph import LintGraph
from qat.onnx.lint.rules import axes, codes, file, fusions, joins, layers, operands, scales
from qat.onnx.modelfile import read_ir, read_proto, refusing_invalid

_TABLES = (file, codes, scales, axes, operands, joins, fusions, layers)
RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for table in _TABLES for rule in table.RULES})
"""Every rule by its name."""


def select_rules(rules: Iterable[str | Rule] | None) -> list[Rule]:
    """Rules by name, or rules of one's own as they are; None is all of them.

    Raises:
        ValueError: no rule has the name.
    """
    if rules is None:
        return list(RULES.values())
    chosen = []
    for rule in rules:
        if isinstance(rule, str) and rule not in RULES:
            raise ValueError(f"there is no rule {rule!r}. The rules are {', '.join(RULES)}.")
        chosen.append(RULES[rule] if isinstance(rule, str) else rule)
    return chosen


def lint(model: Any, *, rules: Iterable[str | Rule] | None = None) -> LintReport:
    """Look in an ONNX file for what keeps TensorRT from running it in INT8, fast and with the file's numbers.

    Args:
        model: path, bytes or ModelProto; made by this library or by any other exporter.
        rules: names of rules, or rules of one's own; all of `RULES` by default.

    Returns:
        Findings: rule, severity, node, why, fix.

    Raises:
        ExportError: the file cannot be read, or is no valid ONNX graph.
        ValueError: an unknown rule.
    """
    chosen = select_rules(rules)
    proto = read_proto(model)
    graph = LintGraph(read_ir(proto))
    with refusing_invalid(proto):
        findings = [
            Finding(rule.name, issue.severity or rule.severity, issue.node, issue.why, issue.fix, issue.repairable)
            for rule in chosen
            for issue in rule.check(graph)
        ]
    findings.sort(key=lambda finding: -finding.severity)
    return LintReport(str(model) if isinstance(model, (str, Path)) else "", tuple(findings))


def assert_clean(
    model: Any,
    *,
    severity: Severity = Severity.WARNING,
    rules: Iterable[str | Rule] | None = None,
    allow: Iterable[str] = (),
) -> LintReport:
    """For tests: fail with the list of findings of that severity or worse.

    Args:
        model: as for `lint`.
        severity: the least that fails.
        rules: as for `lint`.
        allow: names of rules whose findings are accepted.

    Returns:
        The report, with what was accepted.

    Raises:
        AssertionError: findings.
        ExportError: the file cannot be read.
        ValueError: an unknown rule.
    """
    accepted = {rule.name for rule in select_rules(allow)}
    report = lint(model, rules=rules)
    bad = [finding for finding in report.at_least(severity) if finding.rule not in accepted]
    if bad:
        where = f" in '{report.path}'" if report.path else ""
        raise AssertionError(f"{len(bad)} findings{where}:\n" + "\n".join(map(str, bad)))
    return report
