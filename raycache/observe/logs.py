"""Log formats.

text    Python's default: the messages of warnings and errors
json    one object per line: time, level, logger, message, and request_id, replica, rank and epoch where known
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task handles."""

_WITH_HANDLERS = ("huggingface_hub",)
"""Libraries that install log handlers of their own."""

_LINE_PER_REQUEST = ("httpx2",)
"""Libraries that log every request at INFO."""

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every log record; others come from `extra`."""


def set_up(log_format: str, **fields: object) -> dict[str, object]:
    """Set the log format of this process.

    Args:
        log_format: "json"; "text" changes nothing.
        fields: added to every JSON line, such as rank=3.
    Returns:
        The fields, as a mutable mapping: later changes affect later lines.
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


def set_up_actor(log_format: str, **fields: object) -> dict[str, object]:
    """Set the log format of an actor: JSON, so that the launching process finds its warnings, which it shows.

    Args:
        log_format: "json"; "text": only warnings and errors.
        fields: as for `set_up`.
    """
    set_up("json", **fields)
    if log_format != "json":
        logging.getLogger().setLevel(logging.WARNING)
    return fields


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON.

    Args:
        fields: added to every line; may change later.
    """

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without a newline."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        # Names with a leading underscore are attributes that Ray adds.
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN and name[0] != "_"}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
