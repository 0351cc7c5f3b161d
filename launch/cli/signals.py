"""The signals that stop a command unwind the stack, so that what was started is stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unwinding() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first of the signals, and ignore later ones.

    SIGINT too: a shell starts background jobs with SIGINT ignored, and Python keeps that.
    """

    def interrupt(number: int, frame: object) -> None:
        ignore()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_signals() -> list[signal.Signals]:
    """SIGHUP is one (the terminal was closed), unless it is ignored: then nohup wants us to go on."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*numbers, signal.SIGHUP]


def ignore() -> None:
    """An impatient second signal must not end the stopping half-way, with Ray's processes left; it has deadlines."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
