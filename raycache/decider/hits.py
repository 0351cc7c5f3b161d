"""Cache hits of requests: tokens per tier, the reason for each miss, and warnings about tiers that never hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from raycache.cache.holding import Holding
from raycache.cache.prefetches import Prefetch
from raycache.cache.storage_commands import Fetch
from raycache.cache.tree import PrefixHandle
from raycache.types import TIERS, Miss

_LEAST_REQUESTS = 50
"""Requests before a tier without hits is reported."""

_BAD: Mapping[Fetch, Miss] = {
    Fetch.CORRUPT: Miss.CHECKSUM,
    Fetch.FOREIGN: Miss.IDENTITY,
    Fetch.MISSING: Miss.EVICTED_STORAGE,
    Fetch.UNAVAILABLE: Miss.TIMEOUT,
}
_CAUSES: Mapping[str, str] = {
    Miss.NEVER_SEEN: "prompts share no prefix; put what they share at the beginning",
    Miss.SHORTER_THAN_PAGE: "shared prefixes are shorter than a page; use a smaller --page-size",
    Miss.EVICTED_HOST: "prefixes are evicted before they are reused; raise --host-memory",
    Miss.EVICTED_STORAGE: "prefixes are evicted before they are reused; raise the storage's size",
    Miss.STATE_MISSING: "restore points are lost; lower --restore-interval or raise --restore-points",
    Miss.CHECKSUM: "stored pages come back damaged; run `raycache cache scrub` and check the medium",
    Miss.IDENTITY: "it holds prefixes of other weights or formats; give each model its own storage",
    Miss.TIMEOUT: "storage is slow or unreachable; raise --prefetch-timeout-s or use prefetch=wait_complete",
    Miss.SLOWER: "recomputing is faster than loading; a small model may not need this tier",
}


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Cached tokens of a request by tier, as of its first admission.

    Attributes:
        above: miss and component if storage turns out to hold nothing more.
    """

    cached_len: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    miss: Miss = Miss.NONE
    cut_by: str = ""
    above: tuple[Miss, str] = (Miss.NONE, "")

    @classmethod
    def of(
        cls,
        holding: Holding,
        prefetch: Prefetch | None,
        *,
        wanted: int,
        cached_len: int,
        may_load: bool,
        is_load_worth: bool,
    ) -> CacheReport:
        """Report which of `wanted` reusable tokens a starting request takes from which tier, and why not more."""
        on_device = cached_len if holding.load is None else holding.load.num_device
        fetched = 0
        if prefetch is not None:
            fetched = max(0, min(cached_len, prefetch.end) - max(on_device, prefetch.begin))
        counts = dict(zip(TIERS, (on_device, cached_len - on_device - fetched, fetched), strict=True))
        host = holding.cursor.found
        cut_by, above = "", (Miss.NONE, "")
        if not may_load and cached_len < wanted:
            miss = Miss.CHECKSUM
        elif host.length > cached_len:
            miss = Miss.NO_CAPACITY if is_load_worth else Miss.SLOWER
        else:
            miss, cut_by = explain(wanted, cached_len, holding.handle, host, prefetch)
            above = _missed_above(cached_len, holding.handle, host, has_storage=prefetch is not None)
        return cls(cached_len, {tier: count for tier, count in counts.items() if count}, miss, cut_by, above)

    def with_fetched(self, num_tokens: int, *, is_all: bool) -> CacheReport:
        """Add tokens that storage fetched while earlier ones were computed; `is_all`: every whole page is cached."""
        by_tier = {**self.by_tier, "storage": self.by_tier.get("storage", 0) + num_tokens}
        miss = Miss.NONE if is_all else self.miss
        return replace(self, cached_len=self.cached_len + num_tokens, by_tier=by_tier, miss=miss)

    def at_first_token(self, prefetch: Prefetch | None) -> CacheReport:
        """Replace a timeout if storage has replied since admission and holds nothing more."""
        if self.miss is not Miss.TIMEOUT or prefetch is None or _missed_in_storage(prefetch, self.cached_len):
            return self
        return replace(self, miss=self.above[0], cut_by=self.above[1])


class Hits:
    """Counts over all requests."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self._num_requests = 0

    def count(self, report: CacheReport) -> None:
        """Count a request that got its first token."""
        self.tokens.update(report.by_tier)
        self._num_requests += 1
        if report.miss:
            self.misses[report.miss] += 1

    def warnings(self, tiers: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
        """Tiers that store and never hit, with the likely cause."""
        found = []
        for tier, counts in tiers.items():
            stored = counts["saved_pages" if tier == "host" else "persisted_pages"]
            if stored and not self.tokens[tier] and self._num_requests >= _LEAST_REQUESTS:
                found.append(
                    f"tier inert: {tier} has stored {stored:.0f} pages and served none to {self._num_requests} "
                    f"requests; {self._why_inert()}"
                )
        return tuple(found)

    def _why_inert(self) -> str:
        """Why a tier serves nothing. Where prompts do share prefixes, each also has a part that is new."""
        ordinary = (Miss.NEVER_SEEN, Miss.SHORTER_THAN_PAGE) if self.tokens else ()
        misses = Counter({reason: count for reason, count in self.misses.items() if reason not in ordinary})
        for reason, count in misses.most_common(1):
            if cause := _CAUSES.get(reason):
                return f"most often: {reason} ({count}): {cause}"
        return "the tiers above hold everything that is reused"


def explain(
    wanted: int, cached: int, device: PrefixHandle, host: PrefixHandle, prefetch: Prefetch | None
) -> tuple[Miss, str]:
    """Return why only `cached` tokens of a prompt are reused, and the component responsible.

    Args:
        wanted: prompt length in tokens, rounded down to whole pages.
        cached: reused tokens, at most `wanted`.
        device, host: the prompt's match in each tier.
        prefetch: None if storage was not asked.
    """
    if cached >= wanted:
        return (Miss.NONE if wanted else Miss.SHORTER_THAN_PAGE), ""
    if prefetch is not None and (miss := _missed_in_storage(prefetch, cached)) is not None:
        return miss, ""
    return _missed_above(cached, device, host, has_storage=prefetch is not None)


def _missed_above(cached: int, device: PrefixHandle, host: PrefixHandle, *, has_storage: bool) -> tuple[Miss, str]:
    """Return the reason if storage holds nothing beyond `cached` tokens."""
    if max(device.known_length, host.known_length) > cached:
        return Miss.STATE_MISSING, device.cut_by or host.cut_by
    if host.known_length >= device.known_length and host.was_evicted:
        return (Miss.EVICTED_STORAGE if has_storage else Miss.EVICTED_HOST), ""
    return (Miss.EVICTED_DEVICE if device.was_evicted else Miss.NEVER_SEEN), ""


def _missed_in_storage(prefetch: Prefetch, cached: int) -> Miss | None:
    """Return why storage did not deliver pages that it had or might have had."""
    if prefetch.worst in _BAD:
        return _BAD[prefetch.worst]
    if prefetch.end > cached:
        return Miss.EVICTED_HOST  # after it was fetched, before it was used
    return prefetch.why_short if prefetch.num_stored > cached or not prefetch.is_known else None
