"""Follows the requests of a server: what they reused, and what caches of other sizes would have.

reuse = Reuse(page_size=16)
with reuse.follow(request, tenant="alice") as watch:
    for output in outputs:
        watch.take(output)           # counted after its first token is on its way to the client
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from raycache.achievable.curve import Curve
from raycache.achievable.prefixes import Prefixes, PrefixHasher, PrefixSource
from raycache.achievable.recency import Use
from raycache.achievable.sample import MOST_USES, PageSample, Reference
from raycache.achievable.tally import Counted, Tallies
from raycache.divergence.cause import shortfall
from raycache.types import GenerateRequest, RequestOutput

MOST_PAGES = 14_336
"""Pages in the sample; they take about 3 MiB, with the order of their use."""


class Reuse:
    """Counts requests. Belongs to one thread.

    Args:
        page_size: tokens of a cache page.
        sizes: of caches in pages, at which the curve is to be exact while all pages are in the sample.
        max_pages: in the sample.
        max_uses: after which a page that was not used again is forgotten. A request has one or two.
        source: of prefixes; default: they are hashed with unpredictable keys.
        clock: seconds.
    Attributes:
        tallies: what was counted so far.
        curve: the same for caches of other sizes.
    """

    def __init__(
        self,
        *,
        page_size: int,
        sizes: Sequence[int] = (),
        max_pages: int = MOST_PAGES,
        max_uses: int = MOST_USES,
        source: PrefixSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = page_size
        self.source = source or PrefixHasher(page_size)
        self.sample = PageSample(max_pages, max_uses=max_uses)
        self.curve = Curve(sizes)
        self.tallies = Tallies()
        self._prompt_len = 0
        self.clock = clock

    def follow(self, request: GenerateRequest, *, tenant: str) -> ReuseWatch:
        """Follow a request that arrives.

        Args:
            tenant: whose tally it counts in.
        """
        return ReuseWatch(self, request, tenant=tenant)

    def share_at(self, num_tokens: int) -> float:
        """Share of prompt tokens that an LRU cache of this size would have reused."""
        reused = self.curve.num_pages - self.curve.missed_at(num_tokens / self.page_size)
        return min(1.0, max(0.0, reused) * self.page_size / max(1, self._prompt_len))

    def count(
        self, request: GenerateRequest, output: RequestOutput, *, prefixes: Prefixes, seen_s: float, use: Use
    ) -> Counted:
        """Count a request whose prompt has been computed.

        Args:
            prefixes: of the prompt.
            seen_s: when the request arrived.
            use: a new one.
        """
        size = self.page_size
        prompt_len = len(request.prompt)
        # Log-probabilities of the prompt need all of it, whatever is cached.
        end = 0 if request.sampling.prompt_logprobs is not None else (prompt_len - 1) // size
        found = self.sample.use(prefixes.hashes, use)
        self.curve.add(found, end)
        self._prompt_len += prompt_len
        cached = min(output.cached_tokens, end * size)
        new = found.behind(cached // size, end) * size
        variance = found.weight * (found.weight - 1) * size * size if new else 0.0
        is_lost = variance > 0 or cached + new != end * size
        why = _why(found, output, first=cached // size, seen_s=seen_s) if is_lost else None
        return Counted(prompt_len, cached, end * size, new, variance, why)


class ReuseWatch:
    """One request. Use it as a context manager around the whole request."""

    __slots__ = ("_expires_s", "_first", "_output", "_prefixes", "_request", "_reuse", "_seen_s", "_tenant", "_use")

    def __init__(self, reuse: Reuse, request: GenerateRequest, *, tenant: str) -> None:
        self._reuse, self._request, self._tenant = reuse, request, tenant
        self._seen_s = reuse.clock()
        self._expires_s = self._seen_s + request.cache_ttl_s if request.cache_ttl_s else float("inf")
        self._output: list[int] = []
        self._first: RequestOutput | None = None  # the increment with the first token, until it is counted
        self._use: Use | None = None
        self._prefixes: Prefixes | None = None

    def __enter__(self) -> ReuseWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count what was generated as used. The last token is not in the cache."""
        self._count()
        if self._prefixes is None:
            return
        size, prompt = self._reuse.page_size, self._request.prompt
        first = len(prompt) // size * size
        if len(prompt) + len(self._output) - 1 - first >= size:
            grown = self._reuse.source.extended(self._prefixes, [*prompt[first:], *self._output[:-1]])
            self._reuse.sample.use(grown.hashes, Use(self._reuse.clock(), self._expires_s))

    def take(self, output: RequestOutput) -> None:
        """Called with each increment. The next one counts the first, whose client does not wait for it; an equal
        request in between does not count as reuse of it."""
        self._count()
        self._output += output.token_ids
        if self._use is None and output.token_ids:
            self._first, self._use = output, Use(self._reuse.clock(), self._expires_s)

    def _count(self) -> None:
        if self._first is None or self._use is None:
            return
        reuse, request = self._reuse, self._request
        output, self._first = self._first, None
        self._prefixes = reuse.source.of(request.prompt, salt=request.cache_salt, chain=request.page_chain)
        one = reuse.count(request, output, prefixes=self._prefixes, seen_s=self._seen_s, use=self._use)
        reuse.tallies.add(self._tenant, one)


def _why(found: Reference, output: RequestOutput, *, first: int, seen_s: float) -> tuple[str, str]:
    """Cause and kind for the known pages from `first` on that were not reused; of the first one in the sample."""
    last = None
    for run in found.runs:
        if found.places[run.begin + run.length - 1] >= first:
            last = run.use
            break
    is_in_flight = last is not None and last.used_s > seen_s
    is_expired = last is not None and last.expires_s < seen_s
    cause = shortfall(output.miss, is_in_flight=is_in_flight, is_expired=is_expired)
    return str(cause), output.cut_by or str(output.miss)
