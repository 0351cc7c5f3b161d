"""Estimates from recent measurements whether moving a prefix is faster than computing it.

A tier is used only if it saves time. Until both sides were measured a few times, moving is assumed to be faster: a
single measurement on a busy machine says little. A tier that was too slow is retried occasionally.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2  # of the newest measurement
_LEAST_TOKENS = 32  # shorter steps and moves mostly measure overhead
_RETRY_EVERY = 32
_PATIENCE_S = 0.1  # shorter delays of a fetch may be noise of the machine, not the storage
ENOUGH = 3
"""Measurements needed before a pace is used."""


@dataclass(slots=True)
class Pace:
    """Seconds per token of one activity, as a moving average; 0 before the first measurement."""

    s_per_token: float = 0.0
    num_measured: int = 0

    @property
    def known(self) -> float:
        """Seconds per token; 0 before `ENOUGH` measurements."""
        return self.s_per_token if self.num_measured >= ENOUGH else 0.0

    def note(self, seconds: float, num_tokens: int) -> None:
        """Add a measurement."""
        if num_tokens < _LEAST_TOKENS or seconds <= 0:
            return
        new = seconds / num_tokens
        self.num_measured += 1
        self.s_per_token = new if self.s_per_token == 0 else (1 - _WEIGHT) * self.s_per_token + _WEIGHT * new


class Costs:
    """Paces of computing, loading from the host and fetching from storage."""

    def __init__(self) -> None:
        self.compute, self.load, self.fetch = Pace(), Pace(), Pace()
        self._num_refused = 0

    def is_load_worth(self, num_tokens: int) -> bool:
        """Whether loading so many tokens from the host beats computing them."""
        return self._is_worth(self.load.known * num_tokens, num_tokens)

    def is_wait_worth(self, num_tokens: int, *, waited_s: float) -> bool:
        """Whether fetching so many tokens from storage, and loading them, beats computing them.

        Args:
            num_tokens: tokens still missing.
            waited_s: seconds that the request has already waited for them.
        """
        left_s = (self.fetch.known + self.load.known) * num_tokens
        # Also bounds the wait for a storage that was estimated too fast.
        return self._is_worth(max(left_s, waited_s if waited_s > _PATIENCE_S else 0.0), num_tokens)

    def figures(self) -> dict[str, float]:
        """Current paces, for status output and metrics."""
        return {
            "compute_us_per_token": 1e6 * self.compute.s_per_token,
            "load_us_per_token": 1e6 * self.load.s_per_token,
            "fetch_us_per_token": 1e6 * self.fetch.s_per_token,
        }

    def _is_worth(self, move_s: float, num_tokens: int) -> bool:
        if self.compute.known == 0 or move_s <= self.compute.known * num_tokens:
            return True
        self._num_refused += 1
        return self._num_refused % _RETRY_EVERY == 0
