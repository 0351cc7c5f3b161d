"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from raycache.errors import ConfigError


class Outcome(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        check: name of the check.
        outcome: FAILED if launch would refuse to start.
        text: what was found, or what to do.
    """

    check: str
    outcome: Outcome
    text: str


def attempt(name: str, check: Callable[[], str]) -> CheckResult:
    """Run a check that returns what it found and raises ConfigError if it fails."""
    try:
        return CheckResult(name, Outcome.OK, check())
    except ConfigError as error:
        return CheckResult(name, Outcome.FAILED, str(error))
