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
    """Result of a check.

    Attributes:
        check: name of the check.
        outcome: FAILED if `raycache launch` would not start.
        text: details, or what to do.
    """

    check: str
    outcome: Outcome
    text: str


def attempt(name: str, check: Callable[[], str]) -> CheckResult:
    """Run a check that returns its details, or raises ConfigError if it fails."""
    try:
        return CheckResult(name, Outcome.OK, check())
    except ConfigError as error:
        return CheckResult(name, Outcome.FAILED, str(error))
