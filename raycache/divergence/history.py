"""Compares each request of a server with those before it, when it arrives and when its prompt has been computed.

history = PromptHistory(text, page_size=16, max_bytes=64 * 2**20)
with history.begin(prompt, salt=salt, tenant="alice", asked=asked) as watch:
    for output in outputs:
        watch.take(output)           # from the first token on, watch.finding says why no more was reused
"""

from __future__ import annotations

import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from raycache.divergence.cause import Cause, shortfall
from raycache.divergence.examine import LEAST_SHARE, Examined, Examiner
from raycache.divergence.finding import Finding
from raycache.divergence.place import Asked
from raycache.divergence.prefixes import NOT_SEEN, SeenPrefixes
from raycache.divergence.seen import Match, Node, SeenPrompts, Source
from raycache.divergence.sums import Sums, TenantSums
from raycache.divergence.text import TokenText
from raycache.types import RequestOutput

_NEVER = float("inf")
_PREFIX_SHARE = 8
"""Of the memory, for digests of prompts that have left the history."""
_MOST_SALTS, _MOST_TENANTS = 4, 256
_FIRST_PARTINGS, _SAMPLE = 64, 8
"""Of a tenant, examined one by one; of those that follow, one in _SAMPLE, which counts as many times in the sums."""


class _Known:
    """What was found where prompts part, kept with the tree, since most prompts that part there do so for one reason.

    Examined anew at the 1st, 2nd, 4th, 8th ... time. It has no texts: those are shown of requests that are still known.
    None: the first time was not in the sample.
    """

    __slots__ = ("count", "examined")

    def __init__(self, examined: Examined | None) -> None:
        self.count, self.examined = 1, examined and examined.without_texts()


class PromptHistory:
    """Compares prompts. Belongs to one thread.

    Args:
        text: of the model's tokens.
        page_size: tokens of a cache page.
        max_bytes: for known prompts.
        clock: seconds.
        draw: uniform in [0, 1).
    Attributes:
        sums: what was found so far.
    """

    def __init__(
        self,
        text: TokenText,
        *,
        page_size: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._examiner = Examiner(text)
        self.page_size = page_size
        self.seen = SeenPrompts(max_bytes - max_bytes // _PREFIX_SHARE)
        self._prefixes = SeenPrefixes(max_bytes // _PREFIX_SHARE, page_size=page_size)
        self.clock = clock
        self._draw = draw
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
        chain: bytes = b"",
    ) -> Watch:
        """Compare a prompt that arrives.

        Args:
            salt: only prompts with the same one are compared.
            tenant: whose sums it counts in.
            asked: where its text comes from.
            ttl_s: its cache_ttl_s; 0: none.
            is_wanted: the client asks for the finding, so its texts are read in any case.
            chain: its `GenerateRequest.page_chain`, by which it is known once its tokens have been given up.
        """
        now = self.clock()
        sizes = asked.last_sizes() if asked.messages else None
        source = Source(now, _NEVER, now + ttl_s if ttl_s else _NEVER, sizes)
        tokens = prompt if isinstance(prompt, array) else array("i", prompt)
        match = self.seen.add(salt, tokens, source)
        watch = Watch(self, tokens, match=match, source=source, sums=self.sums.of(tenant))
        if chain:
            behind = match.length + len(tokens) // LEAST_SHARE
            found = self._prefixes.add(chain, prompt_len=len(tokens), now=now, known=match.length, behind=behind)
            watch.long_ago = found
        if match.node is not None and not watch.long_ago.length:
            self._look(watch, match.node, asked, is_wanted=is_wanted)
        if tenant:  # without names, salts may divide users who must not learn of each other
            watch.other_salt_len = self._other_salt_len(tenant, salt, tokens, match)
        return watch

    def _other_salt_len(self, tenant: str, salt: str, tokens: array[int], match: Match) -> int:
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

    def _look(self, watch: Watch, node: Node, asked: Asked, *, is_wanted: bool) -> None:
        """Find out what stands where a prompt parts from the known one, or take what is known of others there."""
        known, match, prompt = node.note, watch.match, watch.prompt
        if isinstance(known, _Known):
            known.count += 1
            if not is_wanted and known.count & (known.count - 1):
                watch.examined = known.examined
                return
        if not is_wanted:
            at_stake = min(len(prompt) - match.length, self.seen.rest_len(match))
            if at_stake * LEAST_SHARE < len(prompt):
                return
            if known is None and not self._is_chosen(watch):
                node.note = _Known(None)
                return
        tokens, rest = np.frombuffer(prompt, np.int32), self.seen.rest(match)
        examined = self._examiner.examine(tokens, match, rest, asked, is_wanted=is_wanted)
        watch.examined = examined
        if isinstance(known, _Known):
            known.examined = examined.without_texts()
        else:
            node.note = _Known(examined)

    def _is_chosen(self, watch: Watch) -> bool:
        """Whether a place where no prompt has parted before is in the sample."""
        watch.sums.partings += 1
        if watch.sums.partings <= _FIRST_PARTINGS:
            return True
        watch.weight = _SAMPLE
        return self._draw() * _SAMPLE < 1


class Watch:
    """One request. Use it as a context manager around the whole request.

    Attributes:
        prompt, match: its tokens, and what was known of them.
        sums: of its tenant.
        examined: what stands where it leaves a known prompt, or None.
        weight: requests for which it stands in the sums.
        long_ago: what is known of a prompt that has left the history, if it is more than the match.
        finding: why no more of the prompt was reused; None: not known yet, or nothing known was missed.
        other_salt_len: tokens known under another salt of the tenant; counts in the sums only.
    """

    __slots__ = (
        "_expires_s", "_history", "_is_computed", "_is_in_flight", "_output", "_source", "examined", "finding",
        "long_ago", "match", "other_salt_len", "prompt", "sums", "weight",
    )  # fmt: skip

    def __init__(
        self, history: PromptHistory, prompt: array[int], *, match: Match, source: Source, sums: TenantSums
    ) -> None:
        self._history, self.prompt, self.match, self._source, self.sums = history, prompt, match, source, sums
        known = match.source
        self._is_in_flight = known is not None and known.computed_s == _NEVER
        self._expires_s = _NEVER if known is None else known.expires_s
        self._output: list[int] = []
        self._is_computed = False
        self.examined: Examined | None = None
        self.long_ago = NOT_SEEN
        self.weight = 1
        self.other_salt_len = 0
        self.finding: Finding | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.match.leaf is not None:
            self._history.seen.extend(self.match.leaf, self._output, self._source)

    def take(self, output: RequestOutput) -> None:
        """Called with each increment."""
        self._output += output.token_ids
        if not self._is_computed and output.token_ids:
            self._is_computed = True
            self._source.computed_s = now = self._history.clock()
            self._explain(output, prefill_s=max(0.0, now - self._source.seen_s - output.queued_s))

    def _explain(self, output: RequestOutput, *, prefill_s: float) -> None:
        prompt_len = len(self.prompt)
        computed = prompt_len - output.cached_tokens
        known = self.long_ago if self.long_ago.length else self.match.source
        if known is not None:
            age_s = self._source.seen_s - known.seen_s
            self.finding = self._find(output, age_s=age_s, per_token_s=prefill_s / max(1, computed))
        counted, weight = self.finding, self.weight
        if self.other_salt_len >= self._history.page_size:
            lost = self.other_salt_len // self._history.page_size * self._history.page_size
            lost_s = prefill_s * min(1.0, lost / max(1, computed))
            counted, weight = Finding(Cause.SALT, "", 0, lost, age_s=0.0, lost_s=lost_s), 1
        self.sums.count(prompt_tokens=prompt_len, computed_tokens=computed, prefill_s=prefill_s)
        if counted is not None:
            self.sums.add(counted, weight=weight)

    def _find(self, output: RequestOutput, *, age_s: float, per_token_s: float) -> Finding | None:
        cause, kind, lost = self._shortfall(output)
        token, examined = output.cached_tokens, self.examined
        if examined is not None and (lost <= examined.shared or not lost):
            cause, kind = examined.verdict.cause, examined.verdict.kind
            token = self.match.length
            lost = min(examined.shared, len(self.prompt) - token)
        elif lost:
            examined = None
            self.weight = 1  # of what the engine has lost, each request is counted
        else:
            return None
        computed = len(self.prompt) - output.cached_tokens
        lost_s = per_token_s * min(lost, computed)
        return Finding(cause, kind, token, lost, age_s, lost_s, examined)

    def _shortfall(self, output: RequestOutput) -> tuple[Cause, str, int]:
        """Cause, kind and number of the known tokens that were not reused; 0 for none.

        Of prompts that part, those behind the last whole page do not count.
        """
        size, cached, is_long_ago = self._history.page_size, output.cached_tokens, self.long_ago.length > 0
        reusable = min(max(self.match.length, self.long_ago.length), len(self.prompt) - 1)
        lost = reusable // size * size - cached
        if lost <= 0:
            is_end = self.match.node is None and not is_long_ago
            return Cause.GRANULARITY, "page", max(0, reusable - cached) if is_end else 0
        # Of a prompt that has left the history, it is not known when its cache_ttl_s ended.
        is_expired = self._source.seen_s > self._expires_s and not is_long_ago
        is_in_flight = self._is_in_flight and not is_long_ago
        cause = shortfall(output.miss, is_in_flight=is_in_flight, is_expired=is_expired)
        return cause, output.cut_by or output.miss, lost
