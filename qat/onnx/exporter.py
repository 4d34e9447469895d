"""torch model -> Q/DQ ONNX file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat import __version__
from qat.errors import ExportError
from qat.files import atomic_write
from qat.modes import evaluation_mode
from qat.onnx.binding import AMAX_SUFFIX, bind_sites
from qat.onnx.downgrade import downgrade
from qat.onnx.inputs import as_call, batch_shapes, map_tensors, repeated, tensors_in
from qat.onnx.lowering import lower_sites
from qat.onnx.memory_format import contiguous_weights
from qat.onnx.modelfile import opset_of
from qat.onnx.naming import describe, name_nodes, name_outputs
from qat.onnx.parity import compare
from qat.onnx.report import ParityReport
from qat.onnx.translation import DOMAIN, translation_table
from qat.onnx.typing import to_fp16
from qat.quantizer import QuantizerState, TensorQuantizer, named_quantizers

MIN_OPSET = 13
TORCH_MIN_OPSET = 18
"""torch.onnx.export(dynamo=True) writes no older opset by itself; older ones are converted from this one."""
MAX_BYTES = 2**31 - 1
"""Largest protobuf message."""
PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""What `precision` may be, and the type of all that is not INT8 in such a file."""


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        path: the file.
        opset: its ONNX opset.
        precision: "fp32", "fp16" or "bf16", of all that is not INT8.
        size: bytes.
        quantized: quantizers in the file, in execution order.
        passthrough: quantizers left float, with the reason given when they were.
        unused: quantizers of layers that no output depends on; they are not in the file.
        input_names: graph inputs.
        output_names: graph outputs.
        parity: comparison with torch, None where `verify=False`; of the float32 file, before it is typed.
    """

    path: Path
    opset: int
    precision: str
    size: int
    quantized: tuple[str, ...]
    passthrough: Mapping[str, str]
    unused: tuple[str, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    parity: ParityReport | None


def export(
    model: nn.Module,
    example_inputs: Any,
    path: str | Path,
    *,
    opset: int = 21,
    precision: str = "fp32",
    dynamic_batch: bool = True,
    dynamic_shapes: Any = None,
    int8_weights: bool = True,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    verify: bool = True,
) -> ExportReport:
    """Write a model with TensorQuantizers as a Q/DQ ONNX file for TensorRT's explicit quantization.

    Every quantizer becomes QuantizeLinear and DequantizeLinear with an explicit int8 zero-point of 0 and, as
    initializer `<quantizer>.scale`, the float32 scale with the same bits as the quantizer's. Biases stay float,
    BatchNorm after a quantized weight stays a node. The file carries no date and no machine's paths: exporting
    twice gives the same bytes. It is checked by onnx.checker, compared with torch and only then put in place.

    Args:
        model: calibrated model; exported in evaluation mode, its own modes are restored, also on an error.
        example_inputs: a tensor, positional arguments or a mapping of keyword arguments, on the model's device.
        path: file to write.
        opset: ONNX opset, 13 or newer. 13 to 17 are converted down from 18, the exporter's oldest.
        precision: "fp32", "fp16" or "bf16": type of all that is not INT8, see `qat.onnx.to_fp16`. TensorRT runs a
            float32 remainder in float32. Inputs, outputs and scales stay float32. "bf16" raises the opset to 22.
        dynamic_batch: dimension 0 of every input is dynamic.
        dynamic_shapes: as for torch.onnx.export, for other dynamic dimensions; replaces dynamic_batch.
        int8_weights: store weights as INT8 behind a DequantizeLinear; False keeps floats, with equal numbers.
        input_names: names of the inputs; the argument names by default.
        output_names: names of the outputs; `output`, or `output_0` and on, by default.
        metadata: further text to store in the file's metadata.
        verify: `check_parity` on the example inputs, for a dynamic batch also on two copies of them.

    Returns:
        What was written.

    Raises:
        ExportError: a quantizer is calibrating, uncalibrated or not 8 bit; the opset or precision is refused; torch
            cannot export the model; the file exceeds 2 GiB or differs from torch by more than rounding.
    """
    _check_opset(opset)
    _check_precision(precision)
    aliases = _check_quantizers(model)
    if dynamic_shapes is None and dynamic_batch:
        dynamic_shapes = batch_shapes(example_inputs)
    else:
        dynamic_batch = False
    example_inputs = map_tensors(example_inputs, torch.Tensor.contiguous)
    with evaluation_mode(model), contiguous_weights(model), torch.no_grad():
        program = _torch_export(model, example_inputs, opset, dynamic_batch, dynamic_shapes, input_names)
        sites = bind_sites(program.model, aliases)
        program.optimize()
        present = lower_sites(program.model, sites, int8_weights)
        proto = _finish(program.model, opset, output_names, _facts(present, int8_weights, metadata))
        del program  # a large model's weights are in memory often enough
        data = _checked_bytes(proto)
        batches = [example_inputs, repeated(example_inputs)] if dynamic_batch else [example_inputs]
        parity = _verified(model, data, batches) if verify else None
    if precision != "fp32":
        proto = to_fp16(data, dtype=PRECISIONS[precision]).model
    data = _labelled(proto, precision)
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)
    quantized = tuple(dict.fromkeys(sites[prefix].quantizer for prefix in present))
    return _report(model, Path(path), proto, precision, quantized, parity)


def _report(
    model: nn.Module, path: Path, proto: Any, precision: str, quantized: tuple[str, ...], parity: ParityReport | None
) -> ExportReport:
    states = {name: quantizer.state for name, quantizer in named_quantizers(model)}
    reasons = {name: quantizer.reason for name, quantizer in named_quantizers(model)}
    return ExportReport(
        path=path,
        opset=opset_of(proto),
        precision=precision,
        size=path.stat().st_size,
        quantized=quantized,
        passthrough={n: reasons[n] for n, state in states.items() if state is QuantizerState.PASSTHROUGH},
        unused=tuple(n for n, s in states.items() if s is QuantizerState.QUANTIZING and n not in quantized),
        input_names=tuple(value.name for value in proto.graph.input),
        output_names=tuple(value.name for value in proto.graph.output),
        parity=parity,
    )


def _check_opset(opset: int) -> None:
    from onnx.defs import onnx_opset_version

    if opset < MIN_OPSET:
        raise ExportError(
            f"opset={opset} is refused: QuantizeLinear and DequantizeLinear have a per-channel axis only from "
            f"opset {MIN_OPSET} on. Use opset=21, or {MIN_OPSET} at least."
        )
    if opset > onnx_opset_version():
        raise ExportError(
            f"opset={opset} is newer than the installed onnx package knows ({onnx_opset_version()}). Use opset=21."
        )


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ExportError(f"precision={precision!r} is unknown. Use one of {', '.join(map(repr, PRECISIONS))}.")


def _check_quantizers(model: nn.Module) -> dict[str, str]:
    """Refuse quantizers that cannot be written; return amax key -> quantizer name, also for a second path to one."""
    problems: dict[str, list[str]] = {}
    names: dict[TensorQuantizer, str] = {}
    for name, quantizer in named_quantizers(model):
        names[quantizer] = name
        if quantizer.state is QuantizerState.CALIBRATING:
            problems.setdefault("still calibrating; call load_calib_amax and quantize", []).append(name)
        elif quantizer.state is QuantizerState.QUANTIZING and not quantizer.calibrated:
            problems.setdefault("not calibrated; run qat.calibrate or leave their layers float", []).append(name)
        elif quantizer.state is QuantizerState.QUANTIZING and quantizer.descriptor.num_bits != 8:
            bits = f"{quantizer.descriptor.num_bits} bit wide; TensorRT's INT8 needs num_bits=8"
            problems.setdefault(bits, []).append(name)
    if problems:
        listed = "; ".join(f"{len(found)} quantizers are {why}: {', '.join(found)}" for why, found in problems.items())
        raise ExportError(f"the model cannot be exported: {listed}.")
    return {
        f"{path}{AMAX_SUFFIX}".lstrip("."): names[module]
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, TensorQuantizer)
    }


def _torch_export(
    model: nn.Module,
    example_inputs: Any,
    opset: int,
    dynamic_batch: bool,
    dynamic_shapes: Any,
    input_names: Sequence[str] | None,
) -> Any:
    if dynamic_batch and any(tensor.shape[0] == 1 for tensor in tensors_in(example_inputs) if tensor.dim()):
        example_inputs = repeated(example_inputs)
    args, kwargs = as_call(example_inputs)
    try:
        with _quiet():
            return torch.onnx.export(
                model,
                args,
                kwargs=kwargs or None,
                dynamo=True,
                opset_version=max(opset, TORCH_MIN_OPSET),
                dynamic_shapes=dynamic_shapes,
                input_names=input_names,
                custom_translation_table=translation_table(),
                optimize=False,
                verbose=False,
            )
    except Exception as error:
        hint = " If the batch cannot be dynamic, pass dynamic_batch=False." if dynamic_batch else ""
        raise ExportError(f"torch.onnx.export cannot export the model: {error}{hint}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back the exporter's notes about its own opset handling and about axes that share one name."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="# The axis name")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _facts(present: Sequence[str], int8_weights: bool, metadata: Mapping[str, str] | None) -> dict[str, str]:
    facts = {
        "qat.version": __version__,
        "qat.torch_version": torch.__version__,
        "qat.quantizers": str(len({prefix.partition("/")[0] for prefix in present})),
        "qat.weights": "int8" if int8_weights else "float32",
    }
    clash = sorted({*facts, "qat.opset", "qat.precision"} & set(metadata or {}))
    if clash:
        raise ExportError(f"metadata keys {', '.join(clash)} are written by the exporter. Use other names.")
    return {**facts, **{key: str(value) for key, value in (metadata or {}).items()}}


def _finish(model: Any, opset: int, output_names: Sequence[str] | None, facts: Mapping[str, str]) -> Any:
    """Names, metadata, then ModelProto of the opset asked for."""
    from onnxscript import ir
    from onnxscript.ir.passes import common

    if any(node.domain == DOMAIN for node in ir.traversal.RecursiveGraphIterator(model.graph)):
        raise ExportError("a quantizer acts inside a control-flow branch, which cannot be exported. Move it out.")
    common.RemoveUnusedNodesPass()(model)
    count = len(model.graph.outputs)
    if output_names is not None and len(output_names) != count:
        raise ExportError(f"output_names has {len(output_names)} names; the model returns {count} tensors.")
    name_outputs(model, output_names)
    name_nodes(model)
    describe(model, facts, __version__)
    proto = ir.to_proto(model)
    return downgrade(proto, opset) if opset < TORCH_MIN_OPSET else proto


def _checked_bytes(proto: Any) -> bytes:
    import onnx

    size = proto.ByteSize()
    if size > MAX_BYTES:
        raise ExportError(
            f"the file would have {size / 2**30:.1f} GiB and a protobuf file holds 2 GiB. Store the weights as INT8 "
            "(int8_weights=True), or quantize more layers."
        )
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        raise ExportError(f"the exported file does not pass onnx.checker: {error}") from error
    return bytes(proto.SerializeToString(deterministic=True))


def _labelled(proto: Any, precision: str) -> bytes:
    """The file with what is known of it at the end: its opset, which bfloat16 may have raised, and its precision."""
    from onnx import helper

    known = {entry.key: entry.value for entry in proto.metadata_props}
    facts = {**known, "qat.opset": str(opset_of(proto)), "qat.precision": precision}
    helper.set_model_props(proto, dict(sorted(facts.items())))
    return bytes(proto.SerializeToString(deterministic=True))


def _verified(model: nn.Module, data: bytes, batches: Sequence[Any]) -> ParityReport:
    report = compare(model, data, batches)
    if not report.passed:
        raise ExportError(f"the file differs from torch by more than rounding: {report.worst()}. Nothing was written.")
    return report
