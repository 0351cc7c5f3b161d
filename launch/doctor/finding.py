"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from raycache.errors import ConfigError


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    REFUSED = "refused"


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        subject: what was looked at.
        verdict: whether it can work.
        text: what was found, or what to do.
    """

    subject: str
    verdict: Verdict
    text: str


def attempt(subject: str, check: Callable[[], str]) -> Finding:
    """Run a check that returns what it found and raises ConfigError for a refusal."""
    try:
        return Finding(subject, Verdict.OK, check())
    except ConfigError as refusal:
        return Finding(subject, Verdict.REFUSED, str(refusal))
