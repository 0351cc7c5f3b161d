"""One process at a time has a seat: a newer one ends the one before, also one that does not respond."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.seat import Seat
from raycache.errors import ConfigError, RankLostError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
NOBODY = 65534

_HOLD = """
import os, sys, time
from actors.seat import Seat
os.setuid(int(sys.argv[2]))
seat = Seat(sys.argv[1], timeout_s=10)
print("seated", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(name: str, *, user: int = os.getuid()) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the seat, of this user or another."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _HOLD, name, str(user)]
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


@needs_root
def test_a_process_of_another_user_is_named_at_once() -> None:
    name = secrets.token_hex(8)
    with holder(name, user=NOBODY) as process:
        begin_s = time.monotonic()
        with pytest.raises(ConfigError, match=f"held by process {process.pid} of user nobody, which user root may not"):
            Seat(name, timeout_s=60)
        assert time.monotonic() - begin_s < 5 and process.poll() is None


@needs_root
def test_a_process_of_another_pid_namespace_is_waited_for_and_named() -> None:
    name = secrets.token_hex(8)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    code = "import sys; from actors.seat import Seat; Seat(sys.argv[1], timeout_s=0.3)"
    with holder(name) as process:
        command = ["unshare", "--pid", "--fork", sys.executable, "-c", code, name]
        taker = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert "a process of another PID namespace of user root, has not ended within 0 s" in taker.stderr
        assert process.poll() is None
