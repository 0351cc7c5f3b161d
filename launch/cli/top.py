"""`raycache top`: a live view of a running service in the terminal, from its /status."""

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
from launch.cli.top_view import Figures, Look, view
from launch.service import Service

_QUIT = ("q", "Q", "\x03", "\x04")


def run(endpoint: str | None, *, interval_s: float, timeout_s: float, is_once: bool) -> int:
    """Show a service until q or Ctrl-C.

    Args:
        endpoint: of it; None for the one that runs on this machine.
        interval_s: between two looks.
        timeout_s: for an answer.
        is_once: print a single frame, after two looks.
    Returns:
        Exit status: 1 if there was no answer.
    Raises:
        ConfigError: there is none or more than one on this machine.
    """
    service = None if endpoint else only_service()
    top = _Top(endpoint or (service.endpoint if service else ""), service=service, timeout_s=timeout_s)
    console = Console()
    if is_once or not console.is_terminal:
        top.look()
        time.sleep(interval_s)
        top.look()
        console.print(top.frame())
        return 1 if top.error else 0
    with _keys() as was_quit, Live(console=console, screen=True, auto_refresh=False) as live:
        top.look()
        while True:
            live.update(top.frame(), refresh=True)
            if was_quit(interval_s):
                return 0
            top.look()


class _Top:
    """The last two looks at a service."""

    def __init__(self, endpoint: str, *, service: Service | None, timeout_s: float) -> None:
        self._endpoint, self._service, self._timeout_s = endpoint, service, timeout_s
        self._looks: list[tuple[float, Figures]] = []
        self.error = ""

    def look(self) -> None:
        """Ask the service; what it said last stays while it does not answer."""
        report: Report = status.ask(self._endpoint, service=self._service, timeout_s=self._timeout_s)
        self.error = report.error
        if not report.error:
            self._looks = [*self._looks[-1:], (time.monotonic(), report.figures)]

    def frame(self) -> RenderableType:
        """What there is to show."""
        if not self._looks:
            return Text(f"{self._endpoint}: no answer: {self.error}")
        (before_s, before), (now_s, now) = (self._looks[0], self._looks[-1])
        earlier: dict[str, Any] = dict(before) if len(self._looks) > 1 else {}
        look = Look(now, before=earlier, seconds=now_s - before_s)
        return view(look, endpoint=self._endpoint, error=self.error)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Read keys at once and unseen; gives a function that waits so long for one that quits."""
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
