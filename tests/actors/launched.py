"""`raycache launch` as a process of its own, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


def traces(scratch: Path, processes: list[psutil.Process]) -> set[str]:
    """What the processes of a service, the launching one among them, left in shared memory and temporary files."""
    boards = (path for process in processes for path in Path("/dev/shm").glob(f"raycache-{process.pid}-*"))
    return {str(path) for path in (*boards, *scratch.glob("raycache-*"))}


def start(model: Path, scratch: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raycache", "launch", str(model), "--device", "cpu", "--port", "auto", *flags]
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
