"""`raycache launch` as a person runs it: a process that is started, asked, interrupted, and gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest


def traces() -> set[str]:
    """What a service leaves in shared and temporary memory while it runs."""
    return {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("raycache-*")}


def start(model: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raycache", "launch", str(model), "--device", "cpu", "--port", "0", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))


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


def test_interrupt_leaves_no_process_no_shared_memory_and_no_ray_files(model: Path) -> None:
    before = traces()
    process = start(model, "--cp", "2", "--num-pages", "32", "--no-dashboard")
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
        assert traces() == before
    finally:
        process.kill()


def test_interrupt_while_starting_leaves_nothing(model: Path) -> None:
    before = traces()
    process = start(model, "--no-dashboard")
    try:
        deadline = time.monotonic() + 30
        while not (children := psutil.Process(process.pid).children(recursive=True)) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130
        assert is_gone(children, within_s=10)
        assert traces() == before
    finally:
        process.kill()


def test_a_port_in_use_is_refused_before_anything_starts(model: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start(model, "--port", port)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "in use" in output and port in output
