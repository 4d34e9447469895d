"""Replacing the weights of an engine that was built with refit.

Never run with TensorRT itself: no GPU that the library supports was at hand. The calls were checked against the
bindings of tensorrt 10.16 and 11.4 and of tensorrt_rtx 1.7 (tests/tensorrt/test_api_presence.py).
"""

from __future__ import annotations

from pathlib import Path

from qat.errors import EngineError
from qat.tensorrt.engine import LoadedEngine
from qat.tensorrt.parse import load_onnx_graph


def refit_engine(loaded: LoadedEngine, onnx_path: str | Path) -> None:
    """Give a loaded engine the weights of another file of the same network; its file on disk stays as it is.

    It takes seconds where a build takes minutes. What it costs: an engine built with refit gives up the rewrites that
    rely on the values of weights and scales, so that INT8 layers may lose fusions.

    Args:
        loaded: no runner may have work in flight.
        onnx_path: file with the same nodes and shapes as the one that the engine was built from.

    Raises:
        EngineError: the engine cannot be refitted, or the file does not fit it. The weights are then undefined: load
            the engine again.
    """
    trt, log = loaded.library.trt, loaded.library.log
    if not loaded.engine.refittable:
        raise EngineError(f"'{loaded.path}' cannot be refitted: build it with refit (--refit).")
    load_onnx_graph(onnx_path)
    with log.record() as recorder:
        refitter = trt.Refitter(loaded.engine, log.trt_logger)
        parser_refitter = trt.OnnxParserRefitter(refitter, log.trt_logger)
        done = parser_refitter.refit_from_file(str(onnx_path)) and refitter.refit_cuda_engine()
    if not done:
        errors = [
            parser_refitter.get_error(index).desc() for index in range(parser_refitter.num_errors)
        ] or recorder.errors
        missing = [f"missing weights {names}"] if (names := list(refitter.get_missing_weights())) else []
        reasons = "; ".join([*dict.fromkeys(errors), *missing]) or "no reason was logged"
        raise EngineError(f"'{loaded.path}' does not take the weights of '{onnx_path}': {reasons}. Load it again.")
