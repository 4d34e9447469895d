"""Find what keeps TensorRT from running an ONNX file in INT8, fast and with the file's numbers; repair what is safe.

    qat lint model.onnx
    qat lint model.onnx --fix repaired.onnx
    qat lint model.onnx --severity error --ignore pad-conv --json > findings.json

Exit status, for CI: 0 if there is nothing of that severity or worse, 1 if there is, 2 if the file cannot be read.
With --fix the findings are those of the repaired file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from qat.onnx.lint import RULES, LintReport, Severity, fix, lint


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line."""
    rules = "\n".join(f"  {rule.name:24}{rule.severity.name.lower():9}{rule.summary}" for rule in RULES.values())
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=f"rules:\n{rules}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [severity.name.lower() for severity in Severity]
    parser.add_argument("onnx", metavar="model.onnx", help="any ONNX file")
    parser.add_argument("--fix", metavar="FILE", help="write the file with what is safe to repair repaired")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--severity", choices=names, default="warning", help="the least that fails; default warning")
    parser.add_argument("--ignore", nargs="+", choices=list(RULES), default=[], metavar="RULE", help="rules left out")
    return parser


def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Exit status 0 or 1."""
    options = make_parser(prog).parse_args(args)
    rules = [name for name in RULES if name not in options.ignore]
    changes: tuple[str, ...] = ()
    if options.fix:
        changes = fix(options.onnx, options.fix).changes
    report = lint(options.fix or options.onnx, rules=rules)
    threshold = Severity.of(options.severity)
    if options.json:
        print(json.dumps({**report.to_dict(), "changes": changes}, indent=2))
    else:
        show(report, threshold, changes)
    return 1 if report.at_least(threshold) else 0


def show(report: LintReport, threshold: Severity, changes: tuple[str, ...]) -> None:
    """Print what was repaired and what was found, one line each."""
    for change in changes:
        print(f"fixed   {change}")
    for finding in report.findings:
        print(finding)
    print(
        f"{report.path}: {len(report.findings)} findings, {len(report.at_least(threshold))} of them "
        f"{threshold.name.lower()} or worse"
    )
