"""Which replica gets a request: what each one is believed to have cached, what it has to do, and the choice.

    cost of a replica = tokens of this request that it would compute + tokens that it has to compute already

The least cost wins, so a long prefix in the cache is worth a queue that is shorter than it, and no more. What a replica
has to compute of a request: the part of the prompt that is not cached, then an output as long as outputs have been so
far. One token counts as one, whether it is read or written: that is what it adds to the work of a batch.

An index of prefixes follows each replica. It takes in what was computed there (a request's first token tells, and its
end) and holds as many pages as the replica can, least recently used out first, as there. If a replica reuses less than
the index has, its cache does not reach back so far, or was lost: then all goes that was used no later.

Pure: no clock, no thread, no network. A router belongs to one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from raycache.cache.keys import Identity, PageChain
from raycache.types import GenerateRequest, Miss, RequestOutput

_FIRST_OUTPUT_LEN = 128.0
"""Tokens that an output is taken to have before one has ended."""
_OUTPUT_MEMORY = 32
"""Outputs over which the mean is taken, the latest ones counting most."""
_MAX_PAGES = 1 << 19
"""Of one index, some 170 bytes each."""
_GONE = frozenset(
    {Miss.NEVER_SEEN, Miss.EVICTED_DEVICE, Miss.EVICTED_HOST, Miss.EVICTED_STORAGE, Miss.CHECKSUM, Miss.IDENTITY}
)
"""Reasons that say of a page that it is not there. The others say that it was not used."""


class PrefixIndex:
    """Pages that a replica is believed to have, least recently used first.

    A page stands for its whole prefix. A use of a prefix counts for its pages from the last to the first, so the first
    ones stay longest, and a page that is known vouches for those before it.

    Args:
        capacity: most pages.
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
        """Note a use of a prefix, given by all its pages from the first on."""
        self._num_uses += 1
        for page in reversed(pages):
            self._last_use[page] = self._num_uses
            self._last_use.move_to_end(page)
        while len(self._last_use) > self._capacity:
            self._last_use.popitem(last=False)

    def uses(self, pages: Sequence[bytes]) -> list[int]:
        """Numbers of the last uses of those of a prefix's pages that are known, which are its first ones."""
        return [self._last_use[page] for page in pages[: _length_of(pages, self)]]

    def forget_through(self, use: int) -> None:
        """Forget all pages that were not used later than that use."""
        while self._last_use and next(iter(self._last_use.values())) <= use:
            self._last_use.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._last_use.clear()


@dataclass(eq=False)
class _Replica:
    """What is known of a replica.

    Attributes:
        coming: pages that it is computing -> requests that it does so for.
        work: tokens that it has to compute.
        num_open: requests that it has.
        chosen: number of the choice that fell on it last.
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
        """A request is about to compute these."""
        for page in pages:
            self.coming[page] = self.coming.get(page, 0) + 1

    def end_expecting(self, pages: Sequence[bytes]) -> None:
        """It has, or never will."""
        for page in pages:
            self.coming[page] -= 1
            if not self.coming[page]:
                del self.coming[page]


@dataclass(eq=False)
class Route:
    """A request and the replica that it was given to; filled in by `Router`.

    Attributes:
        tokens: of prompt and output so far, packed.
        chain: of their pages; None where no index is kept.
        pages: those that were there when it was chosen.
        expected_len: tokens that the replica is believed to have of them.
        uses: numbers of the last uses of those that its index had.
        prompt_left, output_left: tokens that are to be computed for it.
        output_len: tokens that came from this replica.
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
        """Name of the one that was chosen."""
        return self._replica.name


class Router:
    """Chooses replicas, and learns from what they answer.

    Args:
        policy: one of the setting `routing`: "prefix"; "load": the least work; "round_robin": each in turn.
    """

    def __init__(self, policy: str, *, page_size: int) -> None:
        self._policy = policy
        self._page_size = page_size
        self._replicas: dict[str, _Replica] = {}
        self._num_choices = 0
        self._mean_output = _FIRST_OUTPUT_LEN

    def add(self, name: str, *, num_pages: int) -> None:
        """Take a replica in.

        Args:
            name: that is not in use.
            num_pages: that its device and host tiers hold together.
        """
        assert name not in self._replicas, f"replica {name} is there already"
        self._replicas[name] = _Replica(name, PrefixIndex(num_pages))

    def remove(self, name: str) -> None:
        """Forget a replica; its routes may still be noted and ended."""
        del self._replicas[name]

    def clear(self, name: str) -> None:
        """The replica's cache was emptied."""
        self._replicas[name].index.clear()

    def work(self, name: str) -> int:
        """Tokens that a replica has to compute."""
        return self._replicas[name].work

    def choose(self, request: GenerateRequest, among: Collection[str]) -> Route:
        """Choose a replica for a request, and count the request as its.

        Args:
            request: that starts, or goes on after the tokens of its output.
            among: names to choose from, at least one.
        Returns:
            To be given to `note` with each increment, and to `end` once.
        """
        self._num_choices += 1
        num_tokens = len(request.prompt) + len(request.output)
        tokens, chain, pages = bytearray(), None, list[bytes]()
        if self._policy == "prefix" and len(self._replicas) > 1:
            tokens += np.asarray([*request.prompt, *request.output], np.int32).tobytes()
            # The model is the same for all; what matters is that no two tenants share a seed.
            chain = PageChain(Identity("", self._page_size, salt=request.cache_salt))
            pages = list(chain.digests(tokens))
        # One token at least is left to compute, and a request that wants the prompt's log-probabilities computes all.
        is_reusing = request.sampling.prompt_logprobs is None
        usable = pages[: (num_tokens - 1) // self._page_size if is_reusing else 0]
        hits = {name: _length_of(usable, self._replicas[name]) * self._page_size for name in among}
        replica = min((self._replicas[name] for name in among), key=lambda one: self._rank(one, hits[one.name]))
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
        """Learn from an increment, as the replica gave it."""
        if not output.token_ids:
            return
        if not route.output_len:
            self._learn(route, output)
        route.output_len += len(output.token_ids)
        if route.chain is not None:
            route.tokens += np.asarray(output.token_ids, np.int32).tobytes()
        # An output that is longer than was thought has one more token to come, as long as it has not ended.
        left = max(1, route.output_left - len(output.token_ids))
        route._replica.work -= route.output_left - left
        route.output_left = left

    def end(self, route: Route) -> None:
        """The request has ended there, in whatever way."""
        replica = route._replica
        replica.num_open -= 1
        replica.work -= route.prompt_left + route.output_left
        if not route.output_len:
            replica.end_expecting(route.pages)
            return
        self._mean_output += (route.output_len - self._mean_output) / _OUTPUT_MEMORY
        if route.chain is not None:
            # The last token was given out and not read again.
            replica.index.add(route.chain.digests(route.tokens[:-4]))

    def _rank(self, replica: _Replica, hit_len: int) -> tuple[int, ...]:
        """What is compared, the least wins. Equal ones take turns."""
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
        """The first token: the whole prompt has been computed."""
        replica = route._replica
        replica.work -= route.prompt_left
        route.prompt_left = 0
        num_reused = output.cached_tokens // self._page_size
        if num_reused < len(route.uses) and output.miss in _GONE:
            replica.index.forget_through(route.uses[num_reused])
        replica.end_expecting(route.pages)
        replica.index.add(route.pages)


def _length_of(pages: Sequence[bytes], known: PrefixIndex | _Replica) -> int:
    """How many first pages are known; by bisection, as a known page vouches for those before it."""
    low, high = 0, len(pages)
    while low < high:
        middle = (low + high) // 2
        if pages[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
