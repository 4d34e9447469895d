"""Reading any ONNX file into an onnx_ir model, and writing one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qat.errors import ExportError
from qat.files import atomic_write

_MAX_BYTES = 2**31 - 1


def read_proto(model: Any) -> Any:
    """ModelProto of a path, of serialized bytes, or of a ModelProto, which is returned as it is.

    Weights in external data beside the file are loaded.

    Raises:
        ExportError: no such file, not ONNX, empty, or another type.
    """
    import onnx

    if isinstance(model, onnx.ModelProto):
        return model
    if not isinstance(model, (str, Path, bytes)):
        raise ExportError(f"{type(model).__name__} is not an ONNX model. Give a path, bytes or a ModelProto.")
    where = "the model given as bytes" if isinstance(model, bytes) else f"'{model}'"
    try:
        proto = onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(str(model))
    except FileNotFoundError as error:
        raise ExportError(f"{where} or its external data is missing: {error}. Check the path.") from error
    except Exception as error:
        raise ExportError(f"{where} is not an ONNX file, or it is truncated: {error}. Export it again.") from error
    if not proto.graph.output:
        raise ExportError(f"{where} has no graph outputs: it is empty or truncated. Export it again.")
    return proto


def read_ir(model: Any, minimum_opset: int = 0) -> Any:
    """onnx_ir model with functions inlined, constants as initializers, and element types and shapes inferred.

    Args:
        model: path, bytes or ModelProto; unchanged.
        minimum_opset: an older file is raised to it.

    Raises:
        ExportError: unreadable, or it cannot be raised.
    """
    from onnx import version_converter
    from onnxscript import ir
    from onnxscript.ir.passes import common

    proto = read_proto(model)
    opset = opset_of(proto)
    if opset < minimum_opset:
        try:
            proto = version_converter.convert_version(proto, minimum_opset)
        except Exception as error:
            raise ExportError(
                f"the file's opset is {opset}, {minimum_opset} is needed, and onnx cannot raise it: {error}. Export it "
                f"again with opset={minimum_opset}."
            ) from error
    try:
        loaded = ir.from_proto(proto)
        common.InlinePass()(loaded)
    except Exception as error:
        raise ExportError(f"the model is not a valid ONNX graph: {error}. Export it again.") from error
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(loaded)
    common.ShapeInferencePass(check_type=False, strict_mode=False)(loaded)
    return loaded


def opset_of(proto: Any) -> int:
    """Version of the standard operators that a ModelProto uses; 1 where it does not say."""
    return max((int(entry.version) for entry in proto.opset_import if entry.domain in {"", "ai.onnx"}), default=1)


def write_ir(model: Any, path: str | Path | None) -> Any:
    """ModelProto of an onnx_ir model after onnx.checker has passed it; written to `path`, unless that is None.

    Raises:
        ExportError: it does not pass, or exceeds what one file may hold.
    """
    import onnx
    from onnxscript import ir

    proto = ir.to_proto(model)
    if proto.ByteSize() > _MAX_BYTES:
        raise ExportError(f"the result has {proto.ByteSize() / 2**30:.1f} GiB and a protobuf file holds 2 GiB.")
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        raise ExportError(f"the result does not pass onnx.checker: {error}. Nothing was written.") from error
    if path is not None:
        with atomic_write(path) as temporary:
            temporary.write_bytes(proto.SerializeToString(deterministic=True))
    return proto
