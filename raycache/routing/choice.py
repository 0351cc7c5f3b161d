"""Routes requests to replicas by expected cache hits and load.

    cost of a replica = tokens of this request it would have to compute + tokens it still has to compute

The cheapest replica wins, so a cached prefix outweighs a longer queue only by its own length. The work of a request is
the uncached part of its prompt plus the expected output length, the mean of recent outputs. Prompt and output tokens
count alike, as each adds one token to a batch.

Requests with the same affinity prefer one replica, their home, which a hash chooses. It gets them if no other has more
of their prompt, and if the wait there is not longer by more than the work of the request itself.

The router keeps a prefix index per replica. A prompt enters it with the first token, the output when the request ends.
Like the replica's cache it is LRU, with the same capacity. If a replica reuses less than its index predicts, it has
evicted or lost pages, so the index drops everything that was not used since.

No I/O, clock or threads. A router belongs to one event loop.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from raycache.cache.keys import Identity, PageChain, unpacked
from raycache.types import GenerateRequest, Miss, RequestOutput, packed

_FIRST_OUTPUT_LEN = 128.0
"""Expected output length in tokens before any request has ended."""
_OUTPUT_MEMORY = 32
"""Time constant, in outputs, of the moving average of output lengths."""
_MAX_PAGES = 1 << 19
"""Maximum size of an index, at about 170 bytes per page."""
_GONE = frozenset(
    {Miss.NEVER_SEEN, Miss.EVICTED_DEVICE, Miss.EVICTED_HOST, Miss.EVICTED_STORAGE, Miss.CHECKSUM, Miss.IDENTITY}
)
"""Miss reasons for pages that the replica does not have. The others mean that it has them but did not use them."""


class PrefixIndex:
    """Pages that a replica is expected to have, in LRU order.

    A page is identified by the digest of its whole prefix. A use of a prefix touches its pages from last to first, so
    the first ones are evicted last, and if a page is known, so are all before it.

    Args:
        capacity: maximum number of pages.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, min(capacity, _MAX_PAGES))
        self._last_use: OrderedDict[bytes, int] = OrderedDict()
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._last_use)

    def __contains__(self, page: bytes) -> bool:
        return page in self._last_use

    def add(self, pages: Sequence[bytes]) -> None:
        """Record a use of a prefix, given by its pages from the first on."""
        self._num_uses += 1
        for page in reversed(pages):
            self._last_use[page] = self._num_uses
            self._last_use.move_to_end(page)
        while len(self._last_use) > self._capacity:
            self._last_use.popitem(last=False)

    def uses(self, pages: Sequence[bytes]) -> list[int]:
        """Numbers of the last uses of a prefix's known pages, which are its first ones."""
        return [self._last_use[page] for page in pages[: _length_of(pages, self)]]

    def forget_through(self, use: int) -> None:
        """Forget all pages whose last use was not after `use`."""
        while self._last_use and next(iter(self._last_use.values())) <= use:
            self._last_use.popitem(last=False)

    def clear(self) -> None:
        """Forget all pages."""
        self._last_use.clear()


@dataclass(eq=False)
class _Replica:
    """The router's view of a replica.

    Attributes:
        coming: pages being computed -> number of requests that compute them.
        work: tokens left to compute.
        num_open: number of open requests.
        chosen: number of the last choice that selected it.
    """

    name: str
    index: PrefixIndex
    coming: dict[bytes, int] = field(default_factory=dict)
    work: int = 0
    num_open: int = 0
    chosen: int = 0

    def __contains__(self, page: bytes) -> bool:
        return page in self.index or page in self.coming

    def expect(self, pages: Sequence[bytes]) -> None:
        """Count a request that is about to compute these pages."""
        for page in pages:
            self.coming[page] = self.coming.get(page, 0) + 1

    def end_expecting(self, pages: Sequence[bytes]) -> None:
        """Count back a request that has computed these pages, or never will."""
        for page in pages:
            self.coming[page] -= 1
            if not self.coming[page]:
                del self.coming[page]


@dataclass(eq=False)
class Route:
    """A request and its replica; maintained by `Router`.

    Attributes:
        tokens: prompt and output so far, packed; empty without an index.
        chain: digests of their pages; None without an index.
        pages: digests of whole pages when the replica was chosen.
        expected_len: expected cache hit in tokens.
        uses: numbers of the last uses of the pages found in the index.
        prompt_left, output_left: tokens left to compute.
        output_len: tokens generated by this replica.
    """

    _replica: _Replica
    tokens: bytearray
    chain: PageChain | None
    pages: list[bytes]
    expected_len: int
    uses: list[int]
    prompt_left: int
    output_left: int
    output_len: int = 0

    @property
    def replica(self) -> str:
        """Name of the chosen replica."""
        return self._replica.name


class Router:
    """Chooses replicas, and tracks their caches and load from their output.

    Args:
        policy: "prefix": least cost; "load": least work; "round_robin": each in turn.
        page_size: tokens per page.
    """

    def __init__(self, policy: str, *, page_size: int) -> None:
        self._policy = policy
        self._page_size = page_size
        self._replicas: dict[str, _Replica] = {}
        self._num_choices = 0
        self._mean_output = _FIRST_OUTPUT_LEN

    def add(self, name: str, *, num_pages: int) -> None:
        """Add a replica.

        Args:
            name: must not be in use.
            num_pages: capacity of its device and host tiers together.
        """
        assert name not in self._replicas, f"replica {name} exists already"
        self._replicas[name] = _Replica(name, PrefixIndex(num_pages))

    def remove(self, name: str) -> None:
        """Remove a replica; its routes may still be passed to `note` and `end`."""
        del self._replicas[name]

    def clear(self, name: str) -> None:
        """Forget what a replica has cached."""
        self._replicas[name].index.clear()

    def work(self, name: str) -> int:
        """Tokens that a replica has left to compute."""
        return self._replicas[name].work

    def choose(self, request: GenerateRequest, among: Collection[str]) -> Route:
        """Choose a replica for a request and add the request to its load.

        Args:
            request: a new one, or one to be continued after its output so far.
            among: names to choose from, at least one.
        Returns:
            A route to pass to `note` with each increment, and to `end` exactly once.
        """
        self._num_choices += 1
        num_tokens = len(request.prompt) + len(request.output)
        tokens, chain, pages = bytearray(), None, list[bytes]()
        if self._policy == "prefix" and len(self._replicas) > 1:
            tokens += packed(request.prompt) + packed(request.output)
            # All replicas serve the same model, so only the salt matters: tenants must not share digests.
            known = unpacked(request.page_chain)[1:]
            chain = PageChain(Identity("", self._page_size, salt=request.cache_salt), known=known)
            pages = list(chain.digests(tokens))
        # At least one token is computed; for log-probabilities of the prompt, all of them.
        is_reusing = request.sampling.prompt_logprobs is None
        usable = pages[: (num_tokens - 1) // self._page_size if is_reusing else 0]
        hits = {name: _length_of(usable, self._replicas[name]) * self._page_size for name in among}
        replica = min((self._replicas[name] for name in among), key=lambda one: self._rank(one, hits[one.name]))
        if request.affinity and self._policy == "prefix":
            home = self._replicas[max(among, key=lambda name: _weight(request.affinity, name))]
            own_work = num_tokens - hits[home.name] + self._output_left(request)
            if hits[home.name] == max(hits.values()) and home.work <= replica.work + own_work:
                replica = home
        expected_len = hits[replica.name]
        route = Route(
            replica,
            tokens,
            chain,
            pages,
            expected_len,
            uses=replica.index.uses(usable),
            prompt_left=num_tokens - expected_len,
            output_left=self._output_left(request),
        )
        replica.chosen = self._num_choices
        replica.num_open += 1
        replica.work += route.prompt_left + route.output_left
        replica.expect(pages)
        return route

    def note(self, route: Route, output: RequestOutput) -> None:
        """Update load and index from an increment of the output."""
        if not output.token_ids:
            return
        if not route.output_len:
            self._learn(route, output)
        route.output_len += len(output.token_ids)
        if route.chain is not None:
            route.tokens += np.asarray(output.token_ids, np.int32).tobytes()
        # An output longer than expected counts as one token left until it ends.
        left = max(1, route.output_left - len(output.token_ids))
        route._replica.work -= route.output_left - left
        route.output_left = left

    def end(self, route: Route) -> None:
        """Remove the request from its replica's load, however it ended."""
        replica = route._replica
        replica.num_open -= 1
        replica.work -= route.prompt_left + route.output_left
        if not route.output_len:
            replica.end_expecting(route.pages)
            return
        self._mean_output += (route.output_len - self._mean_output) / _OUTPUT_MEMORY
        if route.chain is not None:
            # The last token was never fed back into the model, so it is not cached.
            replica.index.add(route.chain.digests(route.tokens[:-4]))

    def _rank(self, replica: _Replica, hit_len: int) -> tuple[int, ...]:
        """Sort key: the lowest wins. Ties go to the replica chosen least recently."""
        match self._policy:
            case "prefix":
                return replica.work - hit_len, replica.work, replica.num_open, replica.chosen
            case "load":
                return replica.work, replica.num_open, replica.chosen
        return (replica.chosen,)

    def _output_left(self, request: GenerateRequest) -> int:
        most = request.sampling.max_tokens
        expected = round(self._mean_output)
        return max(1, (expected if most is None else min(most, expected)) - len(request.output))

    def _learn(self, route: Route, output: RequestOutput) -> None:
        """Update the index at the first token, when the whole prompt has been computed."""
        replica = route._replica
        replica.work -= route.prompt_left
        route.prompt_left = 0
        num_reused = output.cached_tokens // self._page_size
        if num_reused < len(route.uses) and output.miss in _GONE:
            replica.index.forget_through(route.uses[num_reused])
        replica.end_expecting(route.pages)
        replica.index.add(route.pages)


def _weight(affinity: str, name: str) -> bytes:
    """Rendezvous hashing: the replica of the highest weight is the home, and changes only if that one leaves."""
    return hashlib.blake2b(f"{affinity} {name}".encode(), digest_size=8).digest()


def _length_of(pages: Sequence[bytes], known: PrefixIndex | _Replica) -> int:
    """Number of leading pages that are known; by bisection, since all pages before a known one are known."""
    low, high = 0, len(pages)
    while low < high:
        middle = (low + high) // 2
        if pages[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
