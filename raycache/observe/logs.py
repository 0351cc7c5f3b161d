"""Lines of logs, for people or for programs.

text    as Python writes them: warnings and errors, a line each
json    one object per line: time, level, logger, message, and what is known of request, replica, rank and epoch
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that a task of the server works for."""

_WITH_HANDLERS = ("huggingface_hub",)
"""Loggers of libraries that write lines of their own."""

_LINE_PER_REQUEST = ("httpx2",)

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; anything else was given with `extra`."""


def set_up(log_format: str, **fields: object) -> dict[str, object]:
    """Have this process write its logs in a format, from now on.

    Args:
        log_format: "text" leaves everything as it is.
        fields: of every line, such as rank=3.
    Returns:
        Those fields; what is put there later is in the lines that follow.
    """
    if log_format == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines(fields))
        root = logging.getLogger()
        root.handlers = [handler]
        root.setLevel(logging.INFO)
        for name in _WITH_HANDLERS:
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [], True
        for name in _LINE_PER_REQUEST:
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.captureWarnings(True)
    return fields


class JsonLines(logging.Formatter):
    """A record as one line of JSON.

    Args:
        fields: of every line; may change.
    """

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        # Ray adds fields of its own, with an underscore before their names.
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN and name[0] != "_"}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
