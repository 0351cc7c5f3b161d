"""Shows the warnings of actors where the service was launched, wherever they run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

_LEVELS = ("warning", "error", "critical")
_ONCE_IN_S = 30.0
"""Within which the same message of several actors, such as all ranks, is shown once."""


class ActorWarnings:
    """Passes warnings and errors of actors on to stderr, out of all that Ray's log monitor sends to this process.

    Args:
        log_format: "json": as the actor has logged them; "text": their messages.
    """

    def __init__(self, log_format: str) -> None:
        self._is_json = log_format == "json"
        self._shown: dict[str, tuple[str, float]] = {}

    def show(self) -> None:
        """Start, in place of Ray's own output; ends with the connection to Ray."""
        dispatcher.remove_handler("ray_print_logs")
        dispatcher.add_handler("ray_print_logs", self.take)

    def take(self, batch: Mapping[str, Any]) -> None:
        """Show the warnings among the lines of one process."""
        for text in batch["lines"]:
            line = _warning(text)
            if line is None or not self._is_new(str(line["message"]), f"{batch.get('ip')} {batch.get('pid')}"):
                continue
            shown = text if self._is_json else "\n".join(str(line[key]) for key in ("message", "error") if key in line)
            print(shown, file=sys.stderr, flush=True)

    def _is_new(self, message: str, source: str) -> bool:
        """Whether no other process has just said the same."""
        now = time.monotonic()
        self._shown = {text: seen for text, seen in self._shown.items() if now - seen[1] < _ONCE_IN_S}
        first, _ = self._shown.setdefault(message, (source, now))
        return first == source


def _warning(text: str) -> dict[str, Any] | None:
    """A line of a log, if it is a warning or an error of this project's actors."""
    if not text.startswith('{"time": '):
        return None
    try:
        line: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return line if line.get("level") in _LEVELS and "logger" in line and "message" in line else None
