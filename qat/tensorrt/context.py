"""Execution contexts, and what has to be set before there is one.

Never run with TensorRT itself: no GPU that the library supports was at hand. The calls were checked against the
bindings of tensorrt 10.16 and 11.4 and of tensorrt_rtx 1.7 (tests/tensorrt/test_api_presence.py).
"""

from __future__ import annotations

from typing import Any

from qat.errors import EngineError
from qat.tensorrt.engine import LoadedEngine


def stream_weights(loaded: LoadedEngine, budget: int) -> None:
    """Keep `budget` bytes of the weights on the GPU and stream the others; before any context is made.

    Raises:
        EngineError: the engine was built without weight streaming, or TensorRT refuses the budget.
    """
    engine = loaded.engine
    if not engine.streamable_weights_size:
        raise EngineError(
            f"'{loaded.path}' cannot stream its weights: build it with weight_streaming (--allowWeightStreaming)."
        )
    # TensorRT ignores a budget that it does not accept.
    engine.weight_streaming_budget_v2 = budget
    if engine.weight_streaming_budget_v2 != min(budget, engine.streamable_weights_size):
        raise EngineError(
            f"TensorRT refuses a weight streaming budget of {budget} bytes for '{loaded.path}': it cannot be negative, "
            "nor change while another runner uses the engine."
        )


def create_context(loaded: LoadedEngine) -> Any:
    """An execution context with memory of its own.

    Raises:
        EngineError: the GPU's memory does not suffice.
    """
    trt, engine = loaded.library.trt, loaded.engine
    if loaded.library.is_rtx:
        # RTX compiles kernels for dynamic shapes in the background by default; measured times would be those of
        # the fallback kernels.
        config = engine.create_runtime_config()
        config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        context = engine.create_execution_context(config)
    else:
        context = engine.create_execution_context()
    if context is None:
        raise EngineError(f"'{loaded.path}' gets no execution context: the GPU's memory does not suffice.")
    return context
