"""What was reused, what could have been, and what lies between by cause: for each tenant and in total."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple

_MOST_TENANTS = 256
_OTHERS = "(others)"
_SIGMAS = 1.96
"""Standard deviations within which 95 % of estimates lie."""

Key = tuple[str, str]
"""Cause and kind, as in raycache/divergence."""


class Counted(NamedTuple):
    """Tokens of one request.

    Attributes:
        prompt, cached: of the prompt, and those of it that were reused.
        reusable: whole pages of the prompt, without its last token.
        new: estimate of those of `reusable` that no request before has used.
        variance: of `new`, in tokens squared.
        why: why not all of what was known was reused; None: all was.
    """

    prompt: int
    cached: int
    reusable: int
    new: float
    variance: float
    why: Key | None


@dataclass(slots=True)
class Lost:
    """What was lost for one cause.

    Attributes:
        tokens: estimate.
        most: the largest estimate so far, which is what a counter may show.
    """

    tokens: float = 0.0
    variance: float = 0.0
    most: float = 0.0


@dataclass(slots=True)
class Tally:
    """Sums over requests, in tokens.

    Attributes:
        new: tokens that a cache without limits would have computed too: new pages and what is no whole page.
        variance: of `new`.
    """

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    new: float = 0.0
    variance: float = 0.0
    lost: dict[Key, Lost] = field(default_factory=dict)

    def add(self, one: Counted) -> None:
        """Add a request."""
        self.requests += 1
        self.prompt += one.prompt
        self.cached += one.cached
        self.new += one.prompt - one.reusable + one.new
        self.variance += one.variance
        if one.why is not None:
            row = self.lost.get(one.why)
            if row is None:
                row = self.lost[one.why] = Lost()
            row.tokens += one.reusable - one.cached - one.new
            row.variance += one.variance
            row.most = max(row.most, row.tokens)

    def add_all(self, other: Tally) -> None:
        """Add the requests of another one."""
        self.requests += other.requests
        self.prompt += other.prompt
        self.cached += other.cached
        self.new += other.new
        self.variance += other.variance
        for why, lost in list(other.lost.items()):
            row = self.lost.setdefault(why, Lost())
            row.tokens += lost.tokens
            row.variance += lost.variance
            row.most += lost.most

    @property
    def achieved(self) -> float:
        """Share of prompt tokens that were reused."""
        return self.cached / max(1, self.prompt)

    @property
    def achievable(self) -> float:
        """Share of prompt tokens that a cache without limits would have reused."""
        return max(self.achieved, 1 - self.new / max(1, self.prompt))

    @property
    def error(self) -> float:
        """Half of the 95 % interval around `achievable`; 0 while all pages are counted."""
        return _SIGMAS * sqrt(self.variance) / max(1, self.prompt)

    def most_lost(self) -> dict[str, float]:
        """Cause -> tokens, for counters: estimates may fall, these do not."""
        found: dict[str, float] = {}
        for (cause, _), lost in list(self.lost.items()):
            found[cause] = found.get(cause, 0.0) + lost.most
        return found

    def facts(self) -> dict[str, Any]:
        """For JSON, the causes that cost most first."""
        rows = sorted(self.lost.items(), key=lambda row: (-row[1].tokens, row[0]))
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "achieved": round(self.achieved, 5),
            "achievable": round(self.achievable, 5),
            "error": round(self.error, 5),
            "lost": [
                {
                    "cause": cause,
                    "kind": kind,
                    "tokens": max(0, round(lost.tokens)),
                    "share": round(max(0.0, lost.tokens) / max(1, self.prompt), 5),
                    "error": round(_SIGMAS * sqrt(lost.variance) / max(1, self.prompt), 5),
                }
                for (cause, kind), lost in rows
                if lost.tokens > _SIGMAS * sqrt(lost.variance)
            ],
        }


class Tallies:
    """All tenants. Beyond _MOST_TENANTS, further ones are counted as "(others)"."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tally] = {}

    @property
    def total(self) -> Tally:
        """Of all tenants, as of now."""
        found = Tally()
        for tally in list(self.tenants.values()):
            found.add_all(tally)
        return found

    def add(self, tenant: str, one: Counted) -> None:
        """Add a request."""
        tally = self.tenants.get(tenant)
        if tally is None:
            if len(self.tenants) >= _MOST_TENANTS:
                tenant = _OTHERS
            tally = self.tenants.setdefault(tenant, Tally())
        tally.add(one)

    def facts(self, tenant: str) -> dict[str, Any]:
        """Those of one tenant, for JSON."""
        return self.tenants.get(tenant, Tally()).facts()
