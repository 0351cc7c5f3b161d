"""A port scan of a whole service from another host: a network namespace of its own, so that nothing else answers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import make_tiny

_START_S = 300.0
_SCAN_S = 300.0
_PORT = 8000
_OPEN = re.compile(r"^(\d+)/tcp\s+open", re.MULTILINE)


def scan() -> bool:
    """Scan a service that listens everywhere and keeps Ray to itself: only its endpoint may answer."""
    if os.getuid() or not all(map(shutil.which, ("ip", "nmap"))):
        print("scan: skipped, it needs root, ip and nmap")
        return True
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp") as folder, _host() as (name, address):
        model = Path(folder) / "tiny"
        make_tiny(model, "qwen3", max_position_embeddings=2048)
        tiny_tokenizers.byte_level(model)
        flags = ("--tp", "2", "--page-size", "16", "--num-pages", "64", "--host-memory", "16MiB")
        ours = ("--device", "cpu", "--host", "0.0.0.0", "--port", str(_PORT), "--api-key", "scan")
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "raycache", "launch", str(model), *flags, *ours]
        log = Path(folder) / "log"
        environment = {**os.environ, "TMPDIR": folder}
        with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
            try:
                _wait(log, process)
                found = _scan(address)
            finally:
                process.terminate()
                process.wait(60)
    print(f"scan of all TCP ports of {address}: open are {found}", flush=True)
    return found == [_PORT]


@contextmanager
def _host() -> Iterator[tuple[str, str]]:
    """A network namespace and its address, which this one can reach."""
    name = f"rcscan{os.getpid()}"
    inside, outside = "10.99.77.2", "10.99.77.1"
    near, far = f"rcn{os.getpid()}"[:15], f"rcf{os.getpid()}"[:15]
    _ip("netns", "add", name)
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("addr", "add", f"{outside}/24", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", name, "addr", "add", f"{inside}/24", "dev", far)
        _ip("-n", name, "link", "set", far, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield name, inside
    finally:
        _ip("netns", "delete", name)


def _wait(log: Path, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _START_S
    while "endpoint" not in log.read_text():
        if process.poll() is not None or time.monotonic() > end_s:
            raise AssertionError(f"the service did not start:\n{log.read_text()}")
        time.sleep(0.5)


def _scan(address: str) -> list[int]:
    command = ["nmap", "-sT", "-n", "-Pn", "-p-", "--open", "-T4", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SCAN_S, check=True)
    return sorted(int(port) for port in _OPEN.findall(done.stdout))


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
