"""The signals that stop a command unwind the stack, so that what was started is stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AGAIN_S = 0.1
"""Between a signal and the same one again."""


Handler = Callable[[int, object], None]


class Interrupt:
    """Whether one of the signals has come.

    Attributes:
        has_come: set by their handler.
    """

    def __init__(self) -> None:
        self.has_come = False

    def check(self) -> None:
        """Raise KeyboardInterrupt again if one has come: a library may drop what is raised in its callbacks."""
        if self.has_come:
            raise KeyboardInterrupt


@contextmanager
def unwinding() -> Iterator[Interrupt]:
    """Raise KeyboardInterrupt at the first of the signals, and ignore later ones.

    SIGINT too: a shell starts background jobs with SIGINT ignored, and Python keeps that.
    """
    interrupt = Interrupt()

    def handle(number: int, frame: object) -> None:
        ignore()
        interrupt.has_come = True
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        with _repeating(handle):
            yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _repeating(handler: Handler) -> Iterator[None]:
    """Send signals to the main thread again until it has run their handler, which replaces itself.

    Python's handlers run between two instructions of the main thread. A signal that comes just before a blocking call,
    or in another thread, does not interrupt that call, which may last for minutes.
    """
    main, is_over = threading.get_ident(), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def repeat() -> None:
        while number := os.read(reading, 1):
            while not is_over.wait(_AGAIN_S) and signal.getsignal(number[0]) is handler:
                signal.pthread_kill(main, number[0])

    thread = threading.Thread(target=repeat, name="signals", daemon=True)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        os.close(writing)  # ends the thread
        thread.join()
        os.close(reading)


def stop_signals() -> list[signal.Signals]:
    """SIGHUP is one (the terminal was closed), unless it is ignored: then nohup wants us to go on."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*numbers, signal.SIGHUP]


def ignore() -> None:
    """An impatient second signal must not end the stopping half-way, with Ray's processes left; it has deadlines."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
