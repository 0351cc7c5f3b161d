"""Work beside the main thread: its result, its failure, and what interrupts the main thread."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from launch.cli.beside import Beside
from launch.cli.signals import unwinding
from raycache.errors import ConfigError

_LONG_S = 60.0


def test_work_goes_on_while_the_block_runs() -> None:
    is_inside, is_done = threading.Event(), threading.Event()

    def work() -> str:
        assert is_inside.wait(_LONG_S)
        is_done.set()
        return "checked"

    with unwinding():
        beside = Beside(work)
        with beside.interrupting():
            is_inside.set()
            assert is_done.wait(_LONG_S)
        assert beside.result() == "checked"


def test_a_failure_interrupts_the_block_and_is_raised() -> None:
    is_inside = threading.Event()

    def work() -> None:
        assert is_inside.wait(_LONG_S)
        raise ConfigError("no such model")

    with unwinding():
        beside = Beside(work)
        with pytest.raises(ConfigError, match="no such model"), beside.interrupting():
            is_inside.set()
            time.sleep(_LONG_S)
            pytest.fail("it was not interrupted")
    beside.end(_LONG_S)


def test_a_failure_before_the_block_keeps_it_from_running() -> None:
    def work() -> None:
        raise ConfigError("no such model")

    with unwinding():
        beside = Beside(work)
        beside.end(_LONG_S)
        with pytest.raises(ConfigError, match="no such model"), beside.interrupting():
            pytest.fail("it ran")
        with pytest.raises(ConfigError, match="no such model"):
            beside.result()


def test_a_failure_after_the_block_interrupts_nothing() -> None:
    is_behind = threading.Event()

    def work() -> None:
        assert is_behind.wait(_LONG_S)
        raise ConfigError("no such model")

    with unwinding():
        beside = Beside(work)
        with beside.interrupting():
            pass
        is_behind.set()
        with pytest.raises(ConfigError, match="no such model"):
            beside.result()


def test_a_signal_of_somebody_else_is_still_one() -> None:
    is_over = threading.Event()
    with unwinding():
        beside = Beside(lambda: is_over.wait(_LONG_S))
        with pytest.raises(KeyboardInterrupt), beside.interrupting():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_LONG_S)
        is_over.set()
        assert beside.result()


def test_a_signal_that_does_not_interrupt_a_blocking_call_is_sent_again() -> None:
    is_over = threading.Event()

    def work() -> None:
        time.sleep(0.3)  # until the main thread sleeps
        # Handled in this thread by Python's C code, which leaves the main thread's sleep alone.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        is_over.wait(_LONG_S)

    with unwinding():
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            thread = threading.Thread(target=work)
            thread.start()
            time.sleep(_LONG_S)
        assert time.monotonic() - begin < _LONG_S
        is_over.set()
        thread.join()


def test_an_interrupt_that_a_library_dropped_is_raised_at_the_next_check() -> None:
    with unwinding() as interrupt:
        interrupt.check()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(_LONG_S)
        except KeyboardInterrupt:
            pass  # as Cython does with what a callback raises
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()


def test_nothing_of_an_unwinding_block_stays() -> None:
    handler, threads = signal.getsignal(signal.SIGINT), threading.active_count()
    with unwinding():
        pass
    assert signal.getsignal(signal.SIGINT) is handler and threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1
