"""Levels of reasoning effort: clients name those of their own model, and some chat templates refuse the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from raycache.errors import RequestError

LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")


class Template(Protocol):
    """A chat template, as far as it is needed here."""

    def render(self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any] | None = None) -> str:
        """Text of a prompt; raises RequestError where the template refuses."""
        ...


def accepted_efforts(template: Template) -> tuple[str, ...]:
    """The levels that a template does not refuse."""
    return tuple(level for level in LEVELS if _accepts(template, level))


def nearest_effort(wanted: str, accepted: Sequence[str]) -> str:
    """The accepted level next to the wanted one, the higher of two; the wanted one if there is nothing to compare."""
    if wanted in accepted or wanted not in LEVELS or not accepted:
        return wanted
    place = LEVELS.index(wanted)
    return min(reversed(accepted), key=lambda level: abs(LEVELS.index(level) - place))


def _accepts(template: Template, level: str) -> bool:
    try:
        template.render([{"role": "user", "content": "Why?"}], variables={"reasoning_effort": level})
    except RequestError:
        return False
    return True
