"""What the causes cost, summed up for each tenant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raycache.divergence.finding import Finding

_MOST_TENANTS = 256
_MOST_ROWS = 64
_OTHERS = "(others)"

Key = tuple[str, str, str]
"""Cause, kind and place."""


@dataclass(slots=True)
class Row:
    """One cause at one place."""

    requests: int = 0
    lost_tokens: int = 0
    lost_s: float = 0.0


@dataclass(slots=True)
class TenantSums:
    """One tenant.

    Attributes:
        computed_tokens: prompt tokens that were not reused.
        computed_s: time that they took.
    """

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    computed_s: float = 0.0
    rows: dict[Key, Row] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """For JSON, the most expensive causes first."""
        ordered = sorted(self.rows.items(), key=lambda item: (-item[1].lost_tokens, item[0]))
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "computed_s": round(self.computed_s, 3),
            "causes": [
                {
                    "cause": cause,
                    "kind": kind,
                    "place": place,
                    "requests": row.requests,
                    "lost_tokens": row.lost_tokens,
                    "lost_share": round(row.lost_tokens / max(1, self.computed_tokens), 4),
                    "lost_s": round(row.lost_s, 3),
                }
                for (cause, kind, place), row in ordered
            ],
        }


class Sums:
    """All tenants. Beyond _MOST_TENANTS and, for each, _MOST_ROWS, further ones are counted as "(others)"."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantSums] = {}

    def add(
        self, tenant: str, finding: Finding | None, *, prompt_tokens: int, computed_tokens: int, prefill_s: float
    ) -> None:
        """Count a request."""
        if tenant not in self._tenants and len(self._tenants) >= _MOST_TENANTS:
            tenant = _OTHERS
        if (sums := self._tenants.get(tenant)) is None:
            sums = self._tenants[tenant] = TenantSums()
        sums.requests += 1
        sums.prompt_tokens += prompt_tokens
        sums.computed_tokens += computed_tokens
        sums.computed_s += prefill_s
        if finding is None:
            return
        place = "" if finding.place is None else finding.place.label
        key: Key = (finding.cause, finding.kind, place)
        if key not in sums.rows and len(sums.rows) >= _MOST_ROWS:
            key = (finding.cause, "", _OTHERS)
        if (row := sums.rows.get(key)) is None:
            row = sums.rows[key] = Row()
        row.requests += 1
        row.lost_tokens += finding.lost_tokens
        row.lost_s += finding.lost_s

    def facts(self, tenant: str | None = None) -> dict[str, Any]:
        """Tenant -> sums, for JSON; of one tenant only if it is named."""
        chosen = self._tenants if tenant is None else {tenant: self._tenants.get(tenant, TenantSums())}
        return {name: sums.facts() for name, sums in sorted(chosen.items())}
