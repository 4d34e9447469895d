"""Progress bar and clean Ctrl-C for a build, through IProgressMonitor."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from tqdm import tqdm

from qat.tensorrt.api import Library

T = TypeVar("T")


class BuildControl:
    """Shared by the monitor, which TensorRT calls from its threads, and the thread that waits for the build."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._bars: dict[str, Any] = {}
        self.cancelled = threading.Event()

    def start(self, phase: str, steps: int) -> None:
        """A phase with this many steps begins; nested phases get a line each."""
        if self._show:
            with self._lock:
                self._bars[phase] = tqdm(
                    total=steps,
                    desc=phase,
                    leave=False,
                    position=len(self._bars),
                    bar_format="{desc}: {bar} {n}/{total}",
                )

    def step(self, phase: str, step: int) -> bool:
        """A step is done; False asks TensorRT to stop."""
        with self._lock:
            bar = self._bars.get(phase)
            if bar is not None:
                bar.n = min(step + 1, bar.total)
                bar.refresh()
        return not self.cancelled.is_set()

    def finish(self, phase: str) -> None:
        """A phase is over."""
        with self._lock:
            bar = self._bars.pop(phase, None)
            if bar is not None:
                bar.close()

    def close(self) -> None:
        """Remove the bars of phases that did not finish."""
        for phase in list(self._bars):
            self.finish(phase)


def make_monitor(library: Library, control: BuildControl) -> Any:
    """An IProgressMonitor of this library that reports to `control`."""
    trt: Any = library.trt

    class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            control.start(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return control.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            control.finish(phase_name)

    return _Monitor()


def run_cancellable(build: Callable[[], T], control: BuildControl) -> T:
    """Run `build` in a thread so that Ctrl-C reaches this one, and have it stop at its next step.

    Raises:
        KeyboardInterrupt: after the build has stopped; nothing keeps running.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def target() -> None:
        try:
            results.append(build())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=target, name="tensorrt-build")
    with _ctrl_c_sets(control.cancelled) as interrupted:
        thread.start()
        # A wait with a timeout, because Python runs signal handlers only between a main thread's waits.
        while not done.wait(timeout=0.1):
            pass
        thread.join()
    control.close()
    if interrupted.is_set():
        raise KeyboardInterrupt
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def _ctrl_c_sets(cancelled: threading.Event) -> Iterator[threading.Event]:
    """Have SIGINT set `cancelled`, and the event that is given, instead of raising at whatever line is running.

    Only the main thread may change signal handlers; elsewhere nothing happens, as Ctrl-C never reaches that thread.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        cancelled.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        # None: a handler that was not installed from Python.
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
