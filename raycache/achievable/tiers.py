"""How much of what was sent the tiers of a deployment can hold, and what twice as much of one would give.

The tiers are taken for one LRU cache. With write_back, the host tier adds to the device; otherwise it has a copy of it.
A storage has a copy of what is above. Capacities are those of all replicas together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycache.achievable.reuse import Reuse
from raycache.types import TIERS, EngineInfo, EngineStats


@dataclass(frozen=True)
class Capacity:
    """What tiers hold, in tokens.

    Attributes:
        tokens: tier -> tokens.
        is_exclusive: what the host holds is not on the device.
    """

    tokens: Mapping[str, int]
    is_exclusive: bool

    @classmethod
    def of(cls, info: EngineInfo, stats: EngineStats, *, is_exclusive: bool) -> Capacity:
        """The capacity of a deployment; a storage without a limit has none."""
        num_replicas = max(1, len(stats.replicas))
        tokens = {
            tier: int(info.tiers[tier]["tokens"]) * num_replicas for tier in ("device", "host") if tier in info.tiers
        }
        limit = stats.tiers.get("storage", {}).get("bytes_limit", 0)
        host = info.tiers.get("host")
        if limit and host and host["bytes"]:
            tokens["storage"] = int(limit * host["tokens"] / host["bytes"])
        return cls(tokens, is_exclusive)

    def held(self, *, down_to: str = TIERS[-1], doubled: str = "") -> int:
        """Tokens that the tiers hold together.

        Args:
            down_to: without those below it.
            doubled: a tier that is twice as large as it is.
        """
        device, host, storage = (
            self.tokens.get(tier, 0) * (2 if tier == doubled else 1) if TIERS.index(tier) <= TIERS.index(down_to) else 0
            for tier in TIERS
        )
        return max(device + host if self.is_exclusive else max(device, host), storage)


def by_size(reuse: Reuse) -> list[dict[str, Any]]:
    """The curve for JSON: sizes at which something changes, in tokens, and the share of prompt tokens reused."""
    points = []
    last = -1.0
    for size in reuse.curve.sizes:
        share = reuse.share_at(size * reuse.page_size)
        if share != last:
            points.append({"tokens": size * reuse.page_size, "share": round(share, 5)})
        last = share
    return points


def by_tier(reuse: Reuse, capacity: Capacity) -> dict[str, dict[str, float]]:
    """For JSON: the share that an LRU cache of the tiers' size reuses, and what doubling each one adds to it."""
    whole = reuse.share_at(capacity.held())
    return {
        tier: {
            "tokens": tokens,
            "share": round(reuse.share_at(capacity.held(down_to=tier)), 5),
            "gain_if_doubled": round(reuse.share_at(capacity.held(doubled=tier)) - whole, 5),
        }
        for tier, tokens in capacity.tokens.items()
    }
