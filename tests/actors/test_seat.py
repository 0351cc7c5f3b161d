"""One process at a time has a seat: a newer one ends the one before, also one that does not respond."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.seat import Seat
from raycache.errors import RankLostError

_HOLD = """
import sys, time
from actors.seat import Seat
seat = Seat(sys.argv[1], timeout_s=10)
print("seated", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(name: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the seat."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _HOLD, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "seated\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("state", [None, signal.SIGSTOP])
def test_the_process_before_is_ended(state: signal.Signals | None) -> None:
    name = secrets.token_hex(8)
    with holder(name) as process:
        if state is not None:
            process.send_signal(state)
        seat = Seat(name, timeout_s=30)
        assert process.wait(30) == -signal.SIGKILL
        assert 0 < seat.waited_s < 30
        seat.close()


def test_a_free_seat_is_taken_at_once_and_another_is_not_disturbed() -> None:
    name = secrets.token_hex(8)
    with holder(f"{name}-1") as process:
        seat = Seat(f"{name}-0", timeout_s=1)
        assert seat.waited_s < 0.5 and process.poll() is None
        seat.close()
        again = Seat(f"{name}-0", timeout_s=1)
        again.close()


def test_a_process_does_not_end_itself() -> None:
    name = secrets.token_hex(8)
    seat = Seat(name, timeout_s=1)
    with pytest.raises(RankLostError, match="has not ended within 0 s"):
        Seat(name, timeout_s=0.2)
    seat.close()
