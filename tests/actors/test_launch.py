"""`raycache launch` as a person runs it: a process that is started, asked, interrupted, and gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files, with a path short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def traces(scratch: Path, processes: list[psutil.Process]) -> set[str]:
    """What the processes of a service left behind in shared memory and temporary files."""
    boards = (path for process in processes for path in Path("/dev/shm").glob(f"raycache-{process.pid}-*"))
    return {str(path) for path in (*boards, *scratch.glob("raycache-*"))}


def start(model: Path, scratch: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raycache", "launch", str(model), "--device", "cpu", "--port", "0", *flags]
    env = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def endpoint_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("endpoint"):
            return line.split()[1]
    pytest.fail("no endpoint was printed:\n" + "".join(seen))


def is_gone(processes: list[psutil.Process], *, within_s: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not alive


def test_interrupt_leaves_no_process_no_shared_memory_and_no_ray_files(model: Path, scratch: Path) -> None:
    process = start(model, scratch, "--cp", "2", "--num-pages", "32", "--no-dashboard")
    try:
        endpoint = endpoint_of(process)
        answer = httpx.post(
            f"{endpoint}/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 3}, timeout=30
        )
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) > 3, "ranks, engine and Ray run below it"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert is_gone(children, within_s=10)
        assert traces(scratch, children) == set()
    finally:
        process.kill()


@pytest.mark.parametrize("phase", ["starting Ray", "starting ranks"])
def test_interrupt_while_starting_leaves_nothing(model: Path, scratch: Path, phase: str) -> None:
    process = start(model, scratch, "--cp", "2", "--no-dashboard")
    try:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith(phase):
                break
        time.sleep(1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130
        assert is_gone(children, within_s=10)
        assert traces(scratch, children) == set()
    finally:
        process.kill()


def test_a_port_in_use_is_refused_before_anything_starts(model: Path, scratch: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start(model, scratch, "--port", port)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "in use" in output and port in output
