"""A server of its own for a benchmark, started and stopped as an operator does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STOP_S = 60.0


@contextmanager
def launched(model: str, *flags: str) -> Iterator[str]:
    """`raycache launch` on a free port; its endpoint, such as "http://127.0.0.1:43210".

    Raises:
        RuntimeError: it ended before it served; the message has what it said.
    """
    command = [sys.executable, "-m", "raycache", "launch", model, "--port", "auto", "--no-dashboard", *flags]
    with tempfile.TemporaryFile("w+") as log:
        # In a session of its own, so that Ctrl-C reaches it once, from here.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while (endpoint := _endpoint(log.fileno())) is None:
                if process.poll() is not None:
                    raise RuntimeError(f"raycache launch ended with {process.returncode}: {_said(log.fileno())}")
                time.sleep(0.1)
            yield endpoint
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def status(endpoint: str) -> dict[str, Any]:
    """Facts and counters of a server."""
    headers = {"Authorization": f"Bearer {os.environ.get('RAYCACHE_API_KEY', '')}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(f"{endpoint}/status", headers=headers), timeout=30) as answer:
        figures: dict[str, Any] = json.load(answer)
    return figures


def _said(descriptor: int) -> str:
    # The child moves the same file's position: read from the start without it.
    return os.pread(descriptor, 1 << 20, 0).decode("utf-8", "replace")


def _endpoint(descriptor: int) -> str | None:
    lines = (line.split() for line in _said(descriptor).splitlines())
    return next((words[1].removesuffix("/v1") for words in lines if words[:1] == ["endpoint"]), None)
