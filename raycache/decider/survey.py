"""Answers GET /cache/tree: walks the trees of the tiers, in short slices between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from raycache.cache.host_tier import HostTier
from raycache.cache.sequences import SequenceCache
from raycache.cache.survey import Wanted, largest_prefixes
from raycache.decider.admin import CommandResult
from raycache.types import TreeQuery

_SLICE_S = 0.0004
_UNITS = 16
"""Units of work, of a few microseconds each, between two looks at the clock."""


class Survey:
    """A query that is being answered.

    Args:
        root: gives the root digest of a salt.
        secret: key of the ids of prefixes.
        step: number of the current step, the LRU clock.
        clock: in seconds.
    Attributes:
        answer: {"step": that of the query, "tiers": {tier: as `largest_prefixes` returns}}.
    """

    def __init__(
        self,
        cache: SequenceCache,
        query: TreeQuery,
        *,
        root: Callable[[str], bytes],
        secret: bytes,
        step: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.answer: CommandResult = Future()
        self._work = _answer(cache, query, root=root, secret=secret, step=step)
        self._clock = clock

    def go_on(self) -> bool:
        """Work for well below a millisecond; returns whether there is more to do."""
        until_s = self._clock() + _SLICE_S
        while self._clock() < until_s:
            try:
                for _ in range(_UNITS):
                    next(self._work)
            except StopIteration as end:
                self.answer.set_result(end.value)
                return False
        return True


def _answer(
    cache: SequenceCache, query: TreeQuery, *, root: Callable[[str], bytes], secret: bytes, step: int
) -> Generator[None, None, dict[str, Any]]:
    named: dict[bytes, str] = {}
    for salt, name in query.tenants:
        named[root(salt)] = name
        yield
    roots = list(named)
    wanted = Wanted(query.limit, query.depth, None if query.is_all else roots, named, roots[0], secret)
    trees = {"device": cache.device.tree}
    if isinstance(cache.host, HostTier):
        trees["host"] = cache.host.tier.tree
    tiers = {}
    for tier, tree in trees.items():
        tiers[tier] = yield from largest_prefixes(tree, wanted)
    return {"step": step, "tiers": tiers}
