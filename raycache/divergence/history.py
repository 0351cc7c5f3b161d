"""Compares each request of a server with those before it, when it arrives and when its prompt has been computed.

history = PromptHistory(text, page_size=16, max_bytes=64 * 2**20)
with history.begin(prompt, salt=salt, tenant="alice", asked=asked) as watch:
    for output in outputs:
        watch.take(output)           # from the first token on, watch.finding says why no more was reused
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from raycache.divergence.cause import Cause, Verdict
from raycache.divergence.examine import Examined, Examiner
from raycache.divergence.finding import Finding
from raycache.divergence.place import Asked
from raycache.divergence.seen import Match, SeenPrompts, Source
from raycache.divergence.sums import Sums
from raycache.divergence.text import TokenText
from raycache.types import Miss, RequestOutput

_SHORTFALLS = {
    Miss.EVICTED_DEVICE: Cause.CAPACITY,
    Miss.EVICTED_HOST: Cause.CAPACITY,
    Miss.EVICTED_STORAGE: Cause.CAPACITY,
    Miss.NO_CAPACITY: Cause.CAPACITY,
    Miss.STATE_MISSING: Cause.GRANULARITY,
    Miss.SHORTER_THAN_PAGE: Cause.GRANULARITY,
    Miss.IDENTITY: Cause.FORMAT,
    Miss.CHECKSUM: Cause.UNAVAILABLE,
    Miss.TIMEOUT: Cause.UNAVAILABLE,
    Miss.SLOWER: Cause.UNAVAILABLE,
}
_EVICTED = (Miss.EVICTED_DEVICE, Miss.EVICTED_HOST, Miss.EVICTED_STORAGE)


class _Known:
    """What was found where prompts part, kept with the tree, since most prompts that part there do so for one reason.

    Examined anew at the 1st, 2nd, 4th, 8th ... time. It has no texts: those are shown of requests that are still known.
    """

    __slots__ = ("count", "examined")

    def __init__(self, examined: Examined) -> None:
        self.count, self.examined = 1, examined.without_texts()


class PromptHistory:
    """Compares prompts. Belongs to one thread.

    Args:
        text: of the model's tokens.
        page_size: tokens of a cache page.
        max_bytes: for known prompts.
        clock: seconds.
    Attributes:
        sums: what was found so far.
    """

    def __init__(
        self, text: TokenText, *, page_size: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._examiner = Examiner(text)
        self.page_size = page_size
        self.seen = SeenPrompts(max_bytes)
        self.clock = clock
        self.sums = Sums()

    def begin(
        self,
        prompt: Sequence[int],
        *,
        salt: str,
        tenant: str,
        asked: Asked,
        ttl_s: float = 0.0,
        is_wanted: bool = False,
    ) -> Watch:
        """Compare a prompt that arrives.

        Args:
            salt: only prompts with the same one are compared.
            tenant: whose sums it counts in.
            asked: where its text comes from.
            ttl_s: its cache_ttl_s; 0: none.
            is_wanted: the client asks for the finding, so its texts are read in any case.
        """
        now = self.clock()
        source = Source(now, expires_s=now + ttl_s if ttl_s else float("inf"), sizes=asked.last_sizes())
        tokens = np.asarray(prompt, dtype=np.int32)
        match = self.seen.add(salt, tokens, source)
        examined = None
        if match.node is not None:
            examined = self._examined(match, tokens, asked, is_wanted=is_wanted)
        return Watch(self, tokens, match=match, examined=examined, source=source, tenant=tenant)

    def _examined(self, match: Match, tokens: Any, asked: Asked, *, is_wanted: bool) -> Examined:
        assert match.node is not None
        known = match.node.note
        if isinstance(known, _Known):
            known.count += 1
            if not is_wanted and known.count & (known.count - 1):
                return known.examined
        examined = self._examiner.examine(tokens, match, asked)
        if isinstance(known, _Known):
            known.examined = examined.without_texts()
        else:
            match.node.note = _Known(examined)
        return examined


class Watch:
    """One request. Use it as a context manager around the whole request.

    Attributes:
        finding: why no more of the prompt was reused; None: not known yet, or nothing known was missed.
    """

    def __init__(
        self,
        history: PromptHistory,
        prompt: Any,
        *,
        match: Match,
        examined: Examined | None,
        source: Source,
        tenant: str,
    ) -> None:
        self._history, self._prompt, self._match, self._examined = history, prompt, match, examined
        self._source, self._tenant = source, tenant
        self._is_in_flight = match.source is not None and match.source.computed_s == float("inf")
        self._output: list[int] = []
        self._is_computed = False
        self.finding: Finding | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._match.leaf is not None:
            self._history.seen.extend(self._match.leaf, self._output, self._source)

    def take(self, output: RequestOutput) -> None:
        """Called with each increment."""
        if not output.token_ids:
            return
        self._output += output.token_ids
        if not self._is_computed:
            self._is_computed = True
            self._source.computed_s = now = self._history.clock()
            self._explain(output, prefill_s=max(0.0, now - self._source.seen_s - output.queued_s))

    def _explain(self, output: RequestOutput, *, prefill_s: float) -> None:
        computed = len(self._prompt) - output.cached_tokens
        found = max(
            filter(None, (self._shortfall(output), self._divergence(output), self._partial_page(output))),
            key=lambda finding: finding.lost_tokens,
            default=None,
        )
        if found is not None and self._match.source is not None:
            lost_s = prefill_s * min(1.0, found.lost_tokens / max(1, computed))
            found = replace(found, lost_s=lost_s, age_s=self._source.seen_s - self._match.source.seen_s)
        self.finding = found
        self._history.sums.add(
            self._tenant, found, prompt_tokens=len(self._prompt), computed_tokens=computed, prefill_s=prefill_s
        )

    def _shortfall(self, output: RequestOutput) -> Finding | None:
        """Whole pages that are known and were not reused."""
        size = self._history.page_size
        reusable = min(self._match.length, len(self._prompt) - 1) // size * size
        lost = reusable - output.cached_tokens
        if lost <= 0:
            return None
        cause = _SHORTFALLS.get(output.miss)
        if cause is None:
            cause = Cause.CONCURRENT if self._is_in_flight else Cause.GONE
        known = self._match.source
        if output.miss in _EVICTED and known is not None and self._source.seen_s > known.expires_s:
            cause = Cause.EXPIRED
        return Finding(cause, output.cut_by or output.miss.value, output.cached_tokens, lost)

    def _divergence(self, output: RequestOutput) -> Finding | None:
        """What both prompts have behind the place where they part."""
        found = self._examined
        if found is None:
            return None
        verdict: Verdict = found.verdict
        return Finding(
            verdict.cause,
            verdict.kind,
            self._match.length,
            min(found.shared, len(self._prompt) - self._match.length),
            found.place,
            found.before,
            found.this,
            found.other,
        )

    def _partial_page(self, output: RequestOutput) -> Finding | None:
        """Known tokens behind the last whole page, of prompts that do not part."""
        if self._examined is not None:
            return None
        lost = min(self._match.length, len(self._prompt) - 1) - output.cached_tokens
        if not 0 < lost < self._history.page_size:
            return None
        return Finding(Cause.GRANULARITY, "page", output.cached_tokens, lost)
