"""Counts bytes moved between device and host, and the time taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raycache.memory.component import FULL
from raycache.parallel.board import Acks


class Moved:
    """Transfer counters of one decider.

    Args:
        unit_bytes: component space -> bytes of a unit, over all ranks.
    """

    def __init__(self, unit_bytes: Mapping[str, int]) -> None:
        self._unit_bytes = unit_bytes
        self._bytes: Counter[str] = Counter()
        self._save_s = self._load_s = 0.0
        self._acks = Acks()

    def count(self, what: str, num_pages: int, parts: Mapping[str, Sequence[int]]) -> None:
        """Count pages and the units of a restore point as `what`: "saved" or "loaded"."""
        num_bytes = num_pages * self._unit_bytes.get(FULL, 0)
        for space, ids in parts.items():
            num_bytes += len(ids) * self._unit_bytes.get(space, 0)
        self._bytes[what] += num_bytes

    def take_times(self, acks: Acks) -> None:
        """Add the time since the last acknowledgement of the same ranks."""
        before, self._acks = self._acks, acks
        if acks.save_s > before.save_s:
            self._save_s += acks.save_s - before.save_s
        if acks.load_s > before.load_s:
            self._load_s += acks.load_s - before.load_s

    def begin_anew(self, acks: Acks) -> None:
        """Start from a new gang's counters."""
        self._acks = acks

    def figures(self) -> dict[str, float]:
        """Current counters, for status output and metrics."""
        return {
            "saved_bytes": self._bytes["saved"],
            "loaded_bytes": self._bytes["loaded"],
            "save_s": self._save_s,
            "load_s": self._load_s,
        }
