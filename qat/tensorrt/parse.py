"""Reading an ONNX file into a TensorRT network, with errors that name the node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qat.errors import EngineError
from qat.onnx.external_data import escaping_locations
from qat.tensorrt.advice import advice_for
from qat.tensorrt.api import Library
from qat.tensorrt.lint_advice import LinterAdvice
from qat.tensorrt.profiles import NetworkInput


def load_onnx_graph(path: str | Path) -> Any:
    """The ModelProto without its weights' external data.

    Raises:
        EngineError: missing, empty, not ONNX, or with external data outside its folder; TensorRT's parser takes an
            empty file for an empty network.
    """
    import onnx

    file = Path(path)
    if not file.is_file():
        raise EngineError(f"There is no ONNX file '{file}'. Check the path given as --onnx.")
    if file.stat().st_size == 0:
        raise EngineError(f"The ONNX file '{file}' is empty: the export did not finish. Export it again.")
    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception as error:
        raise EngineError(f"'{file}' is not an ONNX file, or it is truncated: {error}. Export it again.") from error
    if any(not node.output for node in model.graph.node):
        raise EngineError(f"'{file}' has a node without outputs: it is not a valid ONNX graph. Export it again.")
    if escaping := escaping_locations(model, file.parent):
        raise EngineError(
            f"'{file}' keeps weights outside its folder, in {escaping}. Refused: copy them beside the ONNX file."
        )
    if not model.graph.output:
        raise EngineError(
            f"'{file}' has no graph outputs: it is not an ONNX file, or it is truncated. Export it again."
        )
    return model


def parse_onnx(library: Library, network: Any, path: str | Path) -> Any:
    """Parse into `network`.

    Returns:
        The parser; it owns the weights, so it must live as long as the network is built from.

    Raises:
        EngineError: TensorRT refuses the file; for each error node, operator, and what the linter finds there.
    """
    parser = library.trt.OnnxParser(network, library.log.trt_logger)
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        linter = LinterAdvice(path)
        lines = [_describe(error, linter) for error in errors] or ["the parser gave no reason"]
        raise EngineError(f"{library.name} {library.version} cannot parse '{path}':\n" + "\n".join(lines))
    return parser


def _describe(error: Any, linter: LinterAdvice) -> str:
    where = f"node '{error.node_name()}' ({error.node_operator()})" if error.node_name() else "the file"
    # Without a driver the parser adds a complaint about CUDA that has nothing to do with the file.
    lines = [line for line in error.desc().strip().splitlines() if "catchCudaError" not in line]
    text = " ".join(lines).rstrip(".")
    advice = linter.about(error.node_name(), text) or [advice_for(error.node_operator(), text)]
    return "\n  ".join([f"- {where}: {text}.", *filter(None, advice)])


def network_inputs(network: Any) -> list[NetworkInput]:
    """Inputs of a parsed network, in order."""
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    return [NetworkInput(t.name, tuple(t.shape), bool(t.is_shape_tensor)) for t in tensors]
