"""Work in a thread while the main thread waits for other processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """Runs `work` in a thread, from now on. It belongs to the main thread, where SIGINT raises KeyboardInterrupt."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # of the failure and the next
        self._is_interrupting = False
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
        self._thread.start()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Interrupt the `with` block, as a signal does, if the work fails before its end; raises its error."""
        with self._lock:
            self._is_interrupting = self._failure is None
        try:
            if self._is_interrupting:
                yield
            with self._lock:  # in here, as the interrupt may come while this waits for it
                self._is_interrupting = False
        except KeyboardInterrupt:
            if self._failure is None:
                raise
        finally:
            self._is_interrupting = False
        if self._failure is not None:
            raise self._failure

    def result(self) -> T:
        """Wait for the result, or raise what the work failed with."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def end(self, timeout_s: float) -> None:
        """Wait until the thread has ended: it may be importing, which an exit of the process must not cut off."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as failure:  # for the main thread, whatever it is
            with self._lock:
                self._failure = failure
                if self._is_interrupting:
                    main = threading.main_thread().ident
                    assert main is not None, "it has started"
                    signal.pthread_kill(main, signal.SIGINT)
