"""TensorRT's log: one logger a process, warnings forwarded to `logging`, everything recorded on request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("qat.tensorrt")

_LEVELS = {
    "INTERNAL_ERROR": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}


class LogRecorder:
    """Messages of one build: all of them in `messages`, the errors again in `errors`."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.errors: list[str] = []

    def add(self, severity: str, message: str) -> None:
        """Keep one message; called from TensorRT's threads."""
        self.messages.append(message)
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self.errors.append(message)


class LogHub:
    """Passes TensorRT's messages on.

    TensorRT keeps the first logger that a process registers and ignores every later one, so there is one logger
    and recorders come and go. Concurrent builds in one process share it: each records both.
    """

    def __init__(self) -> None:
        self._recorders: list[LogRecorder] = []
        self.trt_logger: Any = None

    def emit(self, severity: str, message: str) -> None:
        """Forward one message."""
        logger.log(_LEVELS.get(severity, logging.INFO), "%s", message)
        for recorder in list(self._recorders):
            recorder.add(severity, message)

    @contextmanager
    def record(self) -> Iterator[LogRecorder]:
        """Record every message until the block ends."""
        recorder = LogRecorder()
        self._recorders.append(recorder)
        try:
            yield recorder
        finally:
            self._recorders.remove(recorder)


def make_log_hub(trt: Any) -> LogHub:
    """A hub whose `trt_logger` is an ILogger of this TensorRT module."""
    hub = LogHub()

    class _Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            hub.emit(severity.name, message)

    hub.trt_logger = _Logger()
    return hub
