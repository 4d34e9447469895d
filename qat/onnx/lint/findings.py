"""What a rule is, and what the linter reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from qat.onnx.lint.graph import LintGraph


class Severity(IntEnum):
    """How bad a finding is."""

    INFO = 1
    """Worth knowing; may be intended."""
    WARNING = 2
    """TensorRT builds the file and loses speed or accuracy, mostly without a word."""
    ERROR = 3
    """TensorRT refuses the file, or computes other numbers than the file says."""

    @staticmethod
    def of(name: str) -> Severity:
        """Severity by its name, in lower case.

        Raises:
            ValueError: no such severity.
        """
        try:
            return Severity[name.upper()]
        except KeyError:
            raise ValueError(f"severity {name!r} is unknown. Use info, warning or error.") from None


@dataclass(frozen=True)
class Issue:
    """What a rule's check yields.

    Attributes:
        node: name of the node, or "" for the whole file.
        why: what is there, and what TensorRT does with it.
        fix: what to do.
        repairable: `qat.onnx.fix` does it.
        severity: where it differs from the rule's.
    """

    node: str
    why: str
    fix: str
    repairable: bool = False
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule:
    """One thing that the linter looks for.

    Attributes:
        name: short name with hyphens.
        severity: of its findings.
        summary: what is found, in a few words.
        check: yields the issues of a file.
    """

    name: str
    severity: Severity
    summary: str
    check: Callable[[LintGraph], Iterable[Issue]]


@dataclass(frozen=True)
class Finding:
    """One issue of a file with its rule."""

    rule: str
    severity: Severity
    node: str
    why: str
    fix: str
    repairable: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "severity": self.severity.name.lower()}

    def __str__(self) -> str:
        where = f"'{self.node}'" if self.node else "the file"
        return f"{self.severity.name.lower():7} {self.rule}: {where}: {self.why} {self.fix}"


@dataclass(frozen=True)
class LintReport:
    """Findings, the worst first; `path` is "" where the model did not come from a file."""

    path: str
    findings: tuple[Finding, ...]

    def at_least(self, severity: Severity) -> tuple[Finding, ...]:
        """Findings of that severity or a worse one."""
        return tuple(finding for finding in self.findings if finding.severity >= severity)

    @property
    def clean(self) -> bool:
        """No warning and no error; there may be infos."""
        return not self.at_least(Severity.WARNING)

    def of_rule(self, name: str) -> tuple[Finding, ...]:
        """Findings of one rule."""
        return tuple(finding for finding in self.findings if finding.rule == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: path, number of findings by severity, findings."""
        counts = Counter(finding.severity.name.lower() for finding in self.findings)
        return {"path": self.path, "counts": dict(counts), "findings": [f.to_dict() for f in self.findings]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no findings"
