"""Follows the requests of a server: what they reused, and what caches of other sizes would have.

reuse = Reuse(page_size=16)
with reuse.follow(prompt, salt=salt, tenant="alice") as watch:
    for output in outputs:
        watch.take(output)           # counted with the first token
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from raycache.achievable.curve import Curve
from raycache.achievable.prefixes import Prefixes, PrefixHasher
from raycache.achievable.recency import Use
from raycache.achievable.sample import PageSample, Reference
from raycache.achievable.tally import Counted, Tallies
from raycache.divergence.cause import shortfall
from raycache.types import RequestOutput

MOST_PAGES = 16_384
"""Pages in the sample; they take about 2 MiB, with the order of their use."""


class Reuse:
    """Counts requests. Belongs to one thread.

    Args:
        page_size: tokens of a cache page.
        sizes: of caches in pages, at which the curve is to be exact while all pages are in the sample.
        max_pages: in the sample.
        hasher: of prefixes; default: with unpredictable keys.
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
        hasher: PrefixHasher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = page_size
        self.hasher = hasher or PrefixHasher(page_size)
        self.sample = PageSample(max_pages)
        self.curve = Curve(sizes)
        self.tallies = Tallies()
        self.clock = clock

    def follow(self, prompt: Sequence[int], *, salt: str, tenant: str, ttl_s: float = 0.0) -> ReuseWatch:
        """Follow a request that arrives.

        Args:
            salt: prompts with different ones share nothing.
            tenant: whose tally it counts in.
            ttl_s: its cache_ttl_s; 0: none.
        """
        return ReuseWatch(self, prompt, salt=salt, tenant=tenant, ttl_s=ttl_s)

    def count(self, prefixes: Prefixes, output: RequestOutput, *, prompt_len: int, seen_s: float, use: Use) -> Counted:
        """Count a request whose prompt has been computed.

        Args:
            prefixes: of the prompt.
            seen_s: when the request arrived.
            use: a new one.
        """
        size = self.page_size
        end = (prompt_len - 1) // size
        found = self.sample.use(prefixes.hashes, use)
        self.curve.add(found, end)
        cached = min(output.cached_tokens, end * size)
        new = found.behind(cached // size, end)
        return Counted(
            prompt=prompt_len,
            cached=cached,
            reusable=end * size,
            new=new * size,
            variance=float(found.weight * (found.weight - 1) * size * size) if new else 0.0,
            why=_why(found, output, first=cached // size, seen_s=seen_s),
        )


class ReuseWatch:
    """One request. Use it as a context manager around the whole request."""

    def __init__(self, reuse: Reuse, prompt: Sequence[int], *, salt: str, tenant: str, ttl_s: float) -> None:
        self._reuse, self._prompt, self._salt, self._tenant = reuse, prompt, salt, tenant
        self._seen_s = reuse.clock()
        self._expires_s = self._seen_s + ttl_s if ttl_s else float("inf")
        self._output: list[int] = []
        self._prefixes: Prefixes | None = None

    def __enter__(self) -> ReuseWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count what was generated as used. The last token is not in the cache."""
        if self._prefixes is None:
            return
        size = self._reuse.page_size
        first = len(self._prompt) // size * size
        if len(self._prompt) + len(self._output) - 1 - first >= size:
            tokens = [*self._prompt[first:], *self._output[:-1]]
            grown = self._reuse.hasher.extended(self._prefixes, tokens)
            self._reuse.sample.use(grown.hashes, Use(self._reuse.clock(), self._expires_s))

    def take(self, output: RequestOutput) -> None:
        """Called with each increment."""
        self._output += output.token_ids
        if self._prefixes is None and output.token_ids:
            reuse = self._reuse
            self._prefixes = reuse.hasher.of(self._prompt, salt=self._salt)
            one = reuse.count(
                self._prefixes,
                output,
                prompt_len=len(self._prompt),
                seen_s=self._seen_s,
                use=Use(reuse.clock(), self._expires_s),
            )
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
    return cause.value, output.cut_by or output.miss.value
