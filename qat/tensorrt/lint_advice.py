"""What the linter knows about a file that TensorRT refuses, and files that must not reach TensorRT at all."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qat.errors import EngineError
from qat.onnx.lint import Finding, Severity, lint
from qat.onnx.lint.graph import LintGraph, dims, is_qdq, node_name, operand
from qat.onnx.modelfile import read_ir

logger = logging.getLogger("qat.tensorrt")

_MOST = 3


class LinterAdvice:
    """The linter's findings on one file, by the nodes that TensorRT complains about.

    Args:
        path: the file. Where the linter fails on it, there is no advice: TensorRT's own error is what counts.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._findings: tuple[Finding, ...] = ()
        self._nodes: list[Any] = []
        try:
            self._findings = lint(path).findings
            self._nodes = LintGraph(read_ir(path)).nodes
        except Exception as error:  # A file that TensorRT refuses may be odd in ways that no rule expects.
            logger.debug("The linter cannot read '%s': %s", path, error)

    def about(self, node: str, message: str) -> list[str]:
        """Sentences on a refused node, the worst first.

        Args:
            node: its name; "" where TensorRT names none: then nodes and tensors named in `message` are looked up.
            message: what TensorRT says.

        Returns:
            Findings on the node; else errors of nodes that share a tensor with it; empty where there are none.
        """
        refused = [n for n in self._nodes if node_name(n) == node] if node else self._named_in(message)
        own = self._on({node_name(n) for n in refused}, Severity.WARNING)
        found = own or self._on({node_name(n) for n in self._beside(refused)}, Severity.ERROR)
        return [self._sentence(finding, named=bool(own) and bool(node)) for finding in found[:_MOST]]

    def errors(self) -> list[str]:
        """Sentences on the file's errors, wherever they are."""
        found = [finding for finding in self._findings if finding.severity >= Severity.ERROR]
        return [self._sentence(finding, named=False) for finding in found[:_MOST]]

    def _on(self, names: set[str], severity: Severity) -> list[Finding]:
        return [finding for finding in self._findings if finding.node in names and finding.severity >= severity]

    def _named_in(self, message: str) -> list[Any]:
        words = set(re.findall(r"[^\s:,;()'\"\[\]]+", message))
        return [n for n in self._nodes if node_name(n) in words or any(v and v.name in words for v in n.inputs)]

    def _beside(self, nodes: list[Any]) -> Iterator[Any]:
        for node in nodes:
            for value in (value for value in node.inputs if value is not None):
                if value.producer() is not None:
                    yield value.producer()
            for value in (*node.inputs, *node.outputs):
                yield from (user for user, _ in value.uses()) if value is not None else ()

    def _sentence(self, finding: Finding, named: bool) -> str:
        where = "" if named or not finding.node else f"'{finding.node}': "
        repair = f" `scripts/lint.py {self._path} --fix FILE` does that." if finding.repairable else ""
        return f"[{finding.rule}] {where}{finding.why} {finding.fix}{repair}"


def refuse_lethal(path: str | Path, model: Any) -> None:
    """Refuse what kills the process inside TensorRT instead of failing.

    Known: TensorRT for RTX 1.7 crashes while building a convolution with quantized operands where a scale is computed
    (dynamic quantization). Matrix products with such a scale build.

    Args:
        path: the file.
        model: its ModelProto; the linter reads the file only where that has a scale that is not stored.

    Raises:
        EngineError: names the convolution and the quantizer.
    """
    if not _has_computed_scale(model.graph):
        return
    graph = LintGraph(read_ir(path))
    lethal = {node_name(dq): node_name(conv) for conv, dq in _computed_convolutions(graph)}
    found = [finding for finding in lint(path, rules=["scale-computed"]).findings if finding.node in lethal]
    if found:
        lines = "\n".join(f"- '{f.node}', read by Conv '{lethal[f.node]}': {f.why} {f.fix}" for f in found)
        raise EngineError(f"'{path}' would crash the process inside TensorRT, so it is not built:\n{lines}")


def _has_computed_scale(graph: Any) -> bool:
    stored = {item.name for item in graph.initializer}
    stored |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    quantizers = (node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear"))
    return any(node.input[1] not in stored for node in quantizers if len(node.input) > 1)


def _computed_convolutions(graph: LintGraph) -> Iterator[tuple[Any, Any]]:
    for conv in (node for node in graph.int8_layers if node.op_type == "Conv"):
        for value in conv.inputs[:2]:
            for dequantize in filter(is_qdq, graph.dequantizes(value)):
                scale = operand(dequantize, 1)
                shape = dims(scale)
                if not graph.is_constant(scale) and (shape is None or len(shape) == 0):
                    yield conv, dequantize
