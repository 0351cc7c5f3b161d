"""Compares each request of a server with those before it, when it arrives and when its prompt has been computed.

history = PromptHistory(text, page_size=16, max_bytes=64 * 2**20)
with history.begin(prompt, salt=salt, tenant="alice", asked=asked) as watch:
    for output in outputs:
        watch.take(output)           # from the first token on, watch.finding says why no more was reused
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from raycache.divergence.cause import Cause, shortfall
from raycache.divergence.examine import LEAST_SHARE, Examined, Examiner
from raycache.divergence.finding import Finding
from raycache.divergence.place import Asked
from raycache.divergence.seen import Match, SeenPrompts, Source, Tokens
from raycache.divergence.sums import Sums
from raycache.divergence.text import TokenText
from raycache.types import RequestOutput

_NEVER = float("inf")
_MOST_SALTS, _MOST_TENANTS = 4, 256


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
        self._salts: OrderedDict[str, list[str]] = OrderedDict()  # of the tenants seen last

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
        sizes = asked.last_sizes() if asked.messages else {}
        source = Source(now, expires_s=now + ttl_s if ttl_s else _NEVER, sizes=sizes)
        tokens = np.asarray(prompt, dtype=np.int32)
        match = self.seen.add(salt, tokens, source)
        examined = None
        if match.node is not None:
            examined = self._examined(match, tokens, asked, is_wanted=is_wanted)
        watch = Watch(self, tokens, match=match, examined=examined, source=source, tenant=tenant)
        if tenant:  # without names, salts may divide users who must not learn of each other
            watch.other_salt_len = self._other_salt_len(tenant, salt, tokens, match)
        return watch

    def _other_salt_len(self, tenant: str, salt: str, tokens: Tokens, match: Match) -> int:
        """Tokens of an unknown prompt that are known under another of the tenant's last salts."""
        salts = self._salts.setdefault(tenant, [])
        self._salts.move_to_end(tenant)
        if salt not in salts:
            salts.insert(0, salt)
            del salts[_MOST_SALTS:]
            if len(self._salts) > _MOST_TENANTS:
                self._salts.popitem(last=False)
        if match.length >= self.page_size:
            return 0
        return max((self.seen.known_length(other, tokens) for other in salts if other != salt), default=0)

    def _examined(self, match: Match, tokens: Tokens, asked: Asked, *, is_wanted: bool) -> Examined | None:
        assert match.node is not None
        known = match.node.note
        if isinstance(known, _Known):
            known.count += 1
            if not is_wanted and known.count & (known.count - 1):
                return known.examined
        if not is_wanted and not self._is_much(match, len(tokens)):
            return None
        examined = self._examiner.examine(tokens, match, asked, is_wanted=is_wanted)
        if isinstance(known, _Known):
            known.examined = examined.without_texts()
        else:
            match.node.note = _Known(examined)
        return examined

    @staticmethod
    def _is_much(match: Match, prompt_len: int) -> bool:
        """Whether so much could have been reused that it is worth a look."""
        at_stake = min(prompt_len - match.length, sum(map(len, match.rest)))
        return at_stake * LEAST_SHARE >= prompt_len


class Watch:
    """One request. Use it as a context manager around the whole request.

    Attributes:
        finding: why no more of the prompt was reused; None: not known yet, or nothing known was missed.
        other_salt_len: tokens known under another salt of the tenant; counts in the sums only.
    """

    def __init__(
        self,
        history: PromptHistory,
        prompt: Tokens,
        *,
        match: Match,
        examined: Examined | None,
        source: Source,
        tenant: str,
    ) -> None:
        self._history, self._prompt, self._match, self._examined = history, prompt, match, examined
        self._source, self._tenant = source, tenant
        self._is_in_flight = match.source is not None and match.source.computed_s == _NEVER
        self._expires_s = _NEVER if match.source is None else match.source.expires_s
        self._output: list[int] = []
        self._is_computed = False
        self.other_salt_len = 0
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
        self._output += output.token_ids
        if not self._is_computed and output.token_ids:
            self._is_computed = True
            self._source.computed_s = now = self._history.clock()
            self._explain(output, prefill_s=max(0.0, now - self._source.seen_s - output.queued_s))

    def _explain(self, output: RequestOutput, *, prefill_s: float) -> None:
        computed = len(self._prompt) - output.cached_tokens
        known, examined = self._match.source, self._examined
        if known is not None:
            cause, kind, lost = self._shortfall(output)
            at_place = examined is not None and (lost <= examined.shared or not lost)
            if examined is not None and at_place:
                cause, kind = examined.verdict.cause, examined.verdict.kind
                lost = min(examined.shared, len(self._prompt) - self._match.length)
            if lost or at_place:
                lost_s = prefill_s * min(1.0, lost / max(1, computed))
                token = self._match.length if at_place else output.cached_tokens
                age_s = self._source.seen_s - known.seen_s
                self.finding = Finding(cause, kind, token, lost, age_s, lost_s, examined if at_place else None)
        counted = self.finding
        if (lost := self.other_salt_len // self._history.page_size * self._history.page_size) > 0:
            lost_s = prefill_s * min(1.0, lost / max(1, computed))
            counted = Finding(Cause.SALT, "", 0, lost, age_s=0.0, lost_s=lost_s)
        self._history.sums.add(
            self._tenant, counted, prompt_tokens=len(self._prompt), computed_tokens=computed, prefill_s=prefill_s
        )

    def _shortfall(self, output: RequestOutput) -> tuple[Cause, str, int]:
        """Cause, kind and number of the known tokens that were not reused; 0 for none.

        Of prompts that part, those behind the last whole page do not count.
        """
        size, cached = self._history.page_size, output.cached_tokens
        reusable = min(self._match.length, len(self._prompt) - 1)
        lost = reusable // size * size - cached
        if lost <= 0:
            return Cause.GRANULARITY, "page", max(0, reusable - cached) if self._match.node is None else 0
        is_expired = self._source.seen_s > self._expires_s
        cause = shortfall(output.miss, is_in_flight=self._is_in_flight, is_expired=is_expired)
        return cause, output.cut_by or output.miss.value, lost
