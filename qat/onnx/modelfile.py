"""Reading any ONNX file into an onnx_ir model, and writing one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qat.errors import ExportError, QatError
from qat.files import atomic_write
from qat.onnx.external_data import escaping_locations, external_locations

_MAX_BYTES = 2**31 - 1


def read_proto(model: Any) -> Any:
    """ModelProto of a path, of serialized bytes, or of a ModelProto, which is returned as it is.

    Weights in external data beside the file are loaded.

    Raises:
        ExportError: no such file, not ONNX, empty, or another type; external data that is missing, or outside the
            file's folder, or of a model that is no file.
    """
    import onnx

    if isinstance(model, onnx.ModelProto):
        _refuse_external_data(model)
        return model
    if not isinstance(model, (str, Path, bytes)):
        raise ExportError(f"{type(model).__name__} is not an ONNX model. Give a path, bytes or a ModelProto.")
    where = "the model given as bytes" if isinstance(model, bytes) else f"'{model}'"
    try:
        if isinstance(model, bytes):
            proto = onnx.load_model_from_string(model)
        else:
            proto = onnx.load(str(model), load_external_data=False)
    except FileNotFoundError as error:
        raise ExportError(f"there is no {where}. Check the path.") from error
    except Exception as error:
        raise ExportError(f"{where} is not an ONNX file, or it is truncated: {error}. Export it again.") from error
    if isinstance(model, bytes):
        _refuse_external_data(proto)
    else:
        _load_external_data(proto, Path(model).parent, where)
    if not proto.graph.output:
        raise ExportError(f"{where} has no graph outputs: it is empty or truncated. Export it again.")
    return proto


def _refuse_external_data(proto: Any) -> None:
    if locations := external_locations(proto):
        raise ExportError(f"the model keeps weights in other files, {locations}: give the path of its file instead.")


def _load_external_data(proto: Any, folder: Path, where: str) -> None:
    from onnx.external_data_helper import load_external_data_for_model

    if escaping := escaping_locations(proto, folder):
        raise ExportError(
            f"{where} keeps weights outside its folder, in {escaping}. Refused: copy them beside the file."
        )
    try:
        load_external_data_for_model(proto, str(folder))
    except Exception as error:
        raise ExportError(
            f"weights that {where} keeps in other files cannot be read: {error}. Copy them beside the file."
        ) from error


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
        loaded.graph.sort()  # refuses a cycle, in which whoever walks the graph would stay
        common.InlinePass()(loaded)
    except Exception as error:
        raise ExportError(f"the model is not a valid ONNX graph: {error}. Export it again.") from error
    with refusing_invalid(proto):
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(loaded)
        common.ShapeInferencePass(check_type=False, strict_mode=False)(loaded)
    return loaded


@contextmanager
def refusing_invalid(proto: Any) -> Iterator[None]:
    """Make an exception inside the block an ExportError where onnx finds the model invalid, and only there.

    Raises:
        ExportError: with what onnx finds.
    """
    try:
        yield
    except QatError:
        raise
    except Exception as error:
        problem = _invalid(proto)
        if problem is None:
            raise
        raise ExportError(f"the model is not a valid ONNX graph: {problem}. Export it again.") from error


def _invalid(proto: Any) -> str | None:
    """What onnx has against a model, None where it has nothing."""
    import onnx

    try:
        for tensor in proto.graph.initializer:
            onnx.numpy_helper.to_array(tensor)
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


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
