"""Comparing a Q/DQ file with the torch model it was made from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat.errors import ExportError
from qat.onnx.capture import Call, Capture, run_torch
from qat.onnx.inputs import feeds, map_tensors, tensors_in
from qat.onnx.report import LayerTotals, OutputTotals, ParityReport, ordered
from qat.onnx.segments import FileSite, Weights, cut, find_sites
from qat.quantizer import QuantizerState, named_quantizers
from qat.runtime import OnnxRuntimeRunner

TOLERANCE = 1e-4
"""Largest difference between two quantizers, relative to the tensor's range: some 100 times float32 rounding as
measured on ResNet-50 and EfficientNet-B0, and a hundredth of an INT8 step."""
SUSPICIOUS_DB = 40.0
"""A batch whose outputs agree less than this is compared layer by layer as well."""
LAYER_SAMPLES = 4
"""Samples of a batch in the comparison by layers, which holds every activation in memory."""


def check_parity(
    model: nn.Module, path: str | Path, batches: Iterable[Any], tolerance: float = TOLERANCE, per_layer: bool = False
) -> ParityReport:
    """Compare torch with ONNX Runtime (reference settings) on real batches.

    Two correct implementations of one quantized model do not give equal outputs: float sums in another order
    differ in the last bits, now and then that moves a value across a rounding boundary, and one flipped code
    changes everything behind it. No bound on the outputs separates that from a small real fault in a deep
    model. So the judgement is made where rounding cannot travel. The file is cut at its quantizers; each is fed
    what the same quantizer saw in torch, and two things must hold:

    1. a quantizer given the same input returns the same values, bit for bit (scale, zero-point, axis, clipping;
       stored weights likewise);
    2. the float computation from one set of quantizers to the next, or to an output, agrees within `tolerance`
       of the tensor's range (weights' order, BatchNorm, bias, wiring).

    If every piece is right and the pieces are joined as in torch, the whole is right. The outputs of the uncut
    file are compared as well; those numbers are reported, and fail only where shapes differ or a difference is
    not finite.

    Args:
        model: the exported model; run in evaluation mode on its own device, left as it was.
        path: the file.
        batches: tensors, sequences or mappings, as for the export.
        tolerance: largest relative difference of a float computation between quantizers; a model in half
            precision needs more than the default, which is meant for float32.
        per_layer: compare layers on every batch. False does so on the first one, and on any whose outputs agree
            by less than 40 dB.

    Returns:
        Numbers per output and layer; `passed` sums them up.

    Raises:
        ExportError: no batches, or inputs or outputs that do not fit the file.
        RunnerError: ONNX Runtime cannot load or run the file.
    """
    return compare(model, Path(path).read_bytes(), batches, tolerance, per_layer)


def compare(
    model: nn.Module, data: bytes, batches: Iterable[Any], tolerance: float = TOLERANCE, per_layer: bool = False
) -> ParityReport:
    """`check_parity` on a serialized file."""
    totals, due, count = _compare_outputs(model, OnnxRuntimeRunner(data), batches, per_layer)
    layers = _LayerComparison(model, data)  # when the whole file's session is gone: each is as large as the float model
    for batch in due:
        layers.add(batch)
    return ParityReport(
        outputs=tuple(total.result() for total in totals),
        layers=ordered([row.result(tolerance) for row in layers.rows.values()]),
        unmatched=tuple(sorted(layers.unmatched)),
        tolerance=tolerance,
        batches=count,
    )


def _compare_outputs(
    model: nn.Module, runner: OnnxRuntimeRunner, batches: Iterable[Any], per_layer: bool
) -> tuple[list[OutputTotals], list[Any], int]:
    """Totals of each output, the batches to compare by layers, and the number of batches."""
    totals = [OutputTotals(name) for name in runner.output_names]
    due: list[Any] = []
    count = 0
    for batch in batches:
        given = feeds(batch, runner.input_names)
        reference = run_torch(model, batch, calls=False).outputs
        if len(reference) != len(totals):
            raise ExportError(
                f"the model returns {len(reference)} tensors but the file has the outputs {runner.output_names}."
            )
        results = runner.run(given)
        levels = [
            total.add(ours, torch.as_tensor(results[total.name])) for total, ours in zip(totals, reference, strict=True)
        ]
        if per_layer or count == 0 or min(levels, default=0.0) < SUSPICIOUS_DB:
            due.append(_few(batch, runner))
        count += 1
    if not count:
        raise ExportError("there are no batches to compare on. Give at least one.")
    return totals, due, count


def _few(batch: Any, runner: OnnxRuntimeRunner) -> Any:
    """The first samples of a batch, where the file lets dimension 0 vary."""
    if any(spec.shape and spec.shape[0] is not None for spec in runner.inputs):
        return batch
    if len({tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}) != 1:
        return batch
    return map_tensors(batch, lambda tensor: tensor[:LAYER_SAMPLES] if tensor.dim() else tensor)


class _LayerComparison:
    """Runs the cut file on what torch's quantizers saw, batch by batch."""

    def __init__(self, model: nn.Module, data: bytes) -> None:
        import onnx

        self.model = model
        self.proto = onnx.load_from_string(data)
        self.weights = Weights(self.proto)
        self.quantizers = dict(named_quantizers(model))
        self.amax = {
            name: float(quantizer.amax.abs().max())
            for name, quantizer in self.quantizers.items()
            if quantizer.state is QuantizerState.QUANTIZING and quantizer.amax is not None
        }
        self.sites = find_sites(self.proto, self.amax)
        self.rows: dict[str, LayerTotals] = {}
        self.unmatched: set[str] = set()
        self._runner: OnnxRuntimeRunner | None = None
        self._cut_at: list[FileSite] = []

    def add(self, batch: Any) -> None:
        """Compare one batch."""
        capture = run_torch(self.model, batch)
        matched = self._matched(capture)
        sites = [site for site in matched if not site.weight]
        if self._runner is None or sites != self._cut_at:
            ranks = {site.feed: self._call(capture, site).x.dim() for site in sites}
            self._runner = OnnxRuntimeRunner(cut(self.proto, sites, ranks).SerializeToString())
            self._cut_at = sites
        given = feeds(batch, [value.name for value in self.proto.graph.input])
        forced = {site.feed: self._call(capture, site).x.float().numpy() for site in sites}
        results = self._runner.run({**given, **forced})
        for site in matched:
            self._add_site(site, self._call(capture, site), results)
        for value, reference in zip(self.proto.graph.output, capture.outputs, strict=True):
            row = self.rows.setdefault(value.name, LayerTotals(value.name, "output"))
            row.add_float(reference, torch.as_tensor(results[value.name]), 0.0)

    def _matched(self, capture: Capture) -> list[FileSite]:
        in_file: dict[str, set[int]] = {}
        for site in self.sites:
            in_file.setdefault(site.quantizer, set()).add(site.call)
        good = {name for name, calls in capture.calls.items() if in_file.get(name) == set(range(len(calls)))}
        self.unmatched |= set(capture.calls) - good
        return [site for site in self.sites if site.quantizer in good]

    @staticmethod
    def _call(capture: Capture, site: FileSite) -> Call:
        return capture.calls[site.quantizer][site.call]

    def _add_site(self, site: FileSite, call: Call, results: dict[str, Any]) -> None:
        kind = "weight" if site.weight else "activation"
        row = self.rows.setdefault(site.quantizer, LayerTotals(site.quantizer, kind))
        with torch.no_grad():
            y = self.quantizers[site.quantizer](call.x).cpu() if call.y is None else call.y
        y = y if site.perm is None else y.permute(site.perm)
        if site.weight:
            runner = OnnxRuntimeRunner(self.weights.model(site).SerializeToString(), threads=1)
            results = runner.run({})
        quantized = torch.as_tensor(results[site.result])
        row.add_codes(y, quantized)
        if site.weight:
            row.add_float(y, quantized, self.amax[site.quantizer])
        elif site.entry in results:
            row.add_float(call.x, torch.as_tensor(results[site.entry]), self.amax[site.quantizer])
