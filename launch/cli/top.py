"""`raycache top`: a live terminal view of a running service, from its /status."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from launch.cli import status
from launch.cli.server import only_service
from launch.cli.status import Report
from launch.cli.top_view import Change, Figures, view
from launch.service import Service

_QUIT = ("q", "Q", "\x03", "\x04")


def run(endpoint: str | None, *, key: str, interval_s: float, timeout_s: float, is_once: bool) -> int:
    """Show a service until q or Ctrl-C; returns the exit status, 1 if it did not respond.

    Args:
        endpoint: None: the service running on this machine.
        key: API key; empty: that of RAYCACHE_API_KEY.
        interval_s: between updates.
        timeout_s: for a response.
        is_once: print a single frame, after two queries.
    Raises:
        ConfigError: no or several services run on this machine.
    """
    service = None if endpoint else only_service()
    top = _Top(endpoint or (service.endpoint if service else ""), service=service, timeout_s=timeout_s, key=key)
    console = Console()
    if is_once or not console.is_terminal:
        top.update()
        time.sleep(interval_s)
        top.update()
        console.print(top.frame())
        return 1 if top.error else 0
    with _keys() as was_quit, Live(console=console, screen=True, auto_refresh=False) as live:
        top.update()
        while True:
            live.update(top.frame(), refresh=True)
            if was_quit(interval_s):
                return 0
            top.update()


class _Top:
    """The last two snapshots of a service."""

    def __init__(self, endpoint: str, *, service: Service | None, timeout_s: float, key: str) -> None:
        self._endpoint, self._service, self._timeout_s = endpoint, service, timeout_s
        self._key = key
        self._snapshots: list[tuple[float, Figures]] = []
        self.error = ""

    def update(self) -> None:
        """Query the service; without a response, the last snapshot is kept."""
        report: Report = status.ask(self._endpoint, service=self._service, timeout_s=self._timeout_s, key=self._key)
        self.error = report.error
        if not report.error:
            self._snapshots = [*self._snapshots[-1:], (time.monotonic(), report.figures)]

    def frame(self) -> RenderableType:
        """Render the current frame."""
        if not self._snapshots:
            return Text(f"{self._endpoint}: no response: {self.error}")
        (before_s, before), (now_s, now) = (self._snapshots[0], self._snapshots[-1])
        earlier: dict[str, Any] = dict(before) if len(self._snapshots) > 1 else {}
        change = Change(now, before=earlier, seconds=now_s - before_s)
        return view(change, endpoint=self._endpoint, error=self.error)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Read keys unbuffered and without echo; yields a function that waits some seconds for a key that quits."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def was_quit(seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left_s)[0] and sys.stdin.read(1) in _QUIT:
                return True
        return False

    try:
        yield was_quit
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
