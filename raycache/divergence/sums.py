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
        partings: places where its prompts left known ones, each counted once.
    """

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    computed_s: float = 0.0
    partings: int = 0
    rows: dict[Key, Row] = field(default_factory=dict)

    def count(self, *, prompt_tokens: int, computed_tokens: int, prefill_s: float) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.computed_tokens += computed_tokens
        self.computed_s += prefill_s

    def add(self, finding: Finding, *, weight: int) -> None:
        """Count what was found of a request.

        Args:
            weight: requests for which it stands.
        """
        place = finding.examined and finding.examined.place
        key: Key = (finding.cause, finding.kind, place.label if place else "")
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= _MOST_ROWS:
                key = (finding.cause, "", _OTHERS)
            row = self.rows.setdefault(key, Row())
        row.requests += weight
        row.lost_tokens += weight * finding.lost_tokens
        row.lost_s += weight * finding.lost_s

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
                    "lost_share": round(min(1.0, row.lost_tokens / max(1, self.computed_tokens)), 4),
                    "lost_s": round(row.lost_s, 3),
                }
                for (cause, kind, place), row in ordered
            ],
        }


class Sums:
    """All tenants. Beyond _MOST_TENANTS and, for each, _MOST_ROWS, further ones are counted as "(others)"."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantSums] = {}

    def of(self, tenant: str) -> TenantSums:
        """Those of a tenant."""
        sums = self._tenants.get(tenant)
        if sums is None:
            if len(self._tenants) >= _MOST_TENANTS:
                tenant = _OTHERS
            sums = self._tenants.setdefault(tenant, TenantSums())
        return sums

    def lost(self) -> dict[str, dict[str, int]]:
        """Tenant -> cause -> lost tokens."""
        found: dict[str, dict[str, int]] = {}
        for name, sums in self._tenants.items():
            causes = found[name] = {}
            for (cause, _, _), row in sums.rows.items():
                causes[cause] = causes.get(cause, 0) + row.lost_tokens
        return found

    def facts(self, tenant: str | None = None) -> dict[str, Any]:
        """Tenant -> sums, for JSON; of one tenant only if it is named."""
        chosen = self._tenants if tenant is None else {tenant: self._tenants.get(tenant, TenantSums())}
        return {name: sums.facts() for name, sums in sorted(chosen.items())}
