"""Names of fields in errors, for the APIs whose requests become chats."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

from raycache.errors import RequestError


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error of a chat, naming the fields of the request that the chat was made from.

    Args:
        names: of the chat's fields -> theirs.
    """
    found = re.match(r"\w+", error.field or "")
    blamed = found[0] if found else ""
    message = error.message
    for name, theirs in names.items():
        # Other names are words that a sentence may have for itself. Items of lists have other numbers there.
        if name == blamed or "_" in name:
            message = re.sub(rf"(?<![\w./'\"-]){name}(?![\w[])", theirs, message)
    same = copy.copy(error)
    same.message, same.field = message, names.get(blamed, error.field)
    same.args = (message,)
    return same
