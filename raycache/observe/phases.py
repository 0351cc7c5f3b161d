"""Where the seconds of something go that has phases, one after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Phases:
    """Seconds of phases that follow each other; the first one begins now.

    Attributes:
        seconds: phase -> its seconds; one that comes again adds to them.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str, *, of_it: Mapping[str, float] | None = None) -> None:
        """End a phase; the next one begins.

        Args:
            of_it: parts of it that have names of their own, and are not counted in it.
        """
        now = time.monotonic()
        parts = {**(of_it or {})}
        for name, seconds in {phase: max(0.0, now - self._since - sum(parts.values())), **parts}.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._since = now

    def skip(self) -> None:
        """Begin the next phase now; what was since the end of the last one belongs to none."""
        self._since = time.monotonic()


def slowest(of_ranks: list[Mapping[str, float]]) -> dict[str, float]:
    """The most seconds that any rank took, by phase."""
    names = dict.fromkeys(name for phases in of_ranks for name in phases)
    return {name: max(phases.get(name, 0.0) for phases in of_ranks) for name in names}
