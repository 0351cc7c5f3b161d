"""Speed of the prefix index: the radix tree with its allocator, over a trace and in its single operations.

    python -m benchmarks.index conversation_trace.jsonl                     a trace of Mooncake's format, see README.md
    python -m benchmarks.index conversation_trace.jsonl --peer FOLDER       and SGLang's index beside it, in turns
    python -m benchmarks.index                                              a trace that it makes itself

Everything is CPU time of this process. A request of the replay is a match, a lock, room made by eviction, and, once
`--in-flight` requests run, an insert and a release of one of them; the seed says of which. With a peer, both get the
same events, some dozens at a time, in an order that the seed says too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.trace import TRACE_BLOCK, TraceRequest
from raycache.cache.tree import PrefixHandle, RadixTree
from raycache.memory.pages import PageAllocator, PageIds

PAGE = 64
_VOCABULARY = 150_000
_EVENTS_PER_TURN = 64
Tokens = npt.NDArray[np.int32]


class CacheUnderTest(Protocol):
    """What a replay needs. Another cache, or another set of tiers, is another one of these."""

    name: str

    @staticmethod
    def pack(tokens: Tokens) -> Any: ...

    def begin(self, tokens: Any) -> tuple[int, Any]: ...

    def finish(self, running: Any) -> None: ...

    @property
    def num_cached(self) -> int: ...

    def check(self) -> None: ...


class TreeCache:
    """The tree and the allocator of one tier."""

    name = "RayCache, device tier"

    def __init__(self, *, num_tokens: int) -> None:
        self.tree = RadixTree(PAGE)
        self.pages = PageAllocator(num_tokens // PAGE)
        self._now = 0

    @staticmethod
    def pack(tokens: Tokens) -> bytes:
        """The form in which it wants tokens."""
        return tokens.tobytes()

    def begin(self, tokens: bytes) -> tuple[int, tuple[bytes, PrefixHandle, PageIds]]:
        """Match and lock a prompt, and make room for the rest; returns the length of the hit and what is running."""
        self._now += 1
        handle = self.tree.match(tokens, now=self._now)
        known = handle.pages
        missing = len(tokens) // (4 * PAGE) - len(known)
        if missing > self.pages.num_free:
            self.pages.free(self.tree.evict(missing - self.pages.num_free))
        return handle.length, (tokens, handle, self.pages.allocate(missing))

    def finish(self, running: tuple[bytes, PrefixHandle, PageIds]) -> None:
        """Keep a prompt and unlock it."""
        tokens, handle, pages = running
        adopted = self.tree.extend(handle, tokens, pages, now=self._now)
        if len(pages) and not adopted[0]:
            self.pages.free(pages[~adopted])
        handle.release()

    @property
    def num_cached(self) -> int:
        """Tokens that it caches."""
        return self.tree.num_cached * PAGE

    def check(self) -> None:
        """Assert that no page is lost, when nothing runs."""
        self.tree.check()
        self.pages.check(in_use=np.empty(0, np.int32), cached=self.tree.cached_pages())


# --- the trace --------------------------------------------------------------------------------------------------------


def prompt_tokens(request: TraceRequest) -> Tokens:
    """The tokens of a prompt: block i is drawn from its id, by a generator whose state is the id and the position."""
    ids = np.asarray(request.blocks, np.uint64)[:, None] * np.uint64(TRACE_BLOCK) + np.arange(
        TRACE_BLOCK, dtype=np.uint64
    )
    mixed = ids.ravel()[: request.prompt_len] + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    tokens: Tokens = ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(_VOCABULARY)).astype(np.int32)
    return tokens


def events_of(num_requests: int, *, in_flight: int, seed: int) -> Iterator[tuple[bool, int]]:
    """(whether it begins, number of the request), in an order that could be."""
    draw, running = random.Random(seed), list[int]()
    for i in range(num_requests):
        if len(running) == in_flight:
            yield False, running.pop(draw.randrange(in_flight))
        yield True, i
        running.append(i)
    for i in running:
        yield False, i


def turns_of(events: Iterable[tuple[bool, int]]) -> Iterator[list[tuple[bool, int]]]:
    """Some dozens of events at a time."""
    turn = []
    for event in events:
        turn.append(event)
        if len(turn) == _EVENTS_PER_TURN:
            yield turn
            turn = []
    yield turn


@dataclass
class Replayed:
    """One cache after a replay.

    Attributes:
        us_per_request: CPU time of match, lock, evict, insert and release.
        hit_rate: share of all prompt tokens.
        bytes_per_page: everything that the cache holds, by cached page; 0.0 if it cannot be told.
    """

    us_per_request: float
    hit_rate: float
    bytes_per_page: float = 0.0


@dataclass
class _Side:
    cache: CacheUnderTest
    running: dict[int, Any] = field(default_factory=dict)
    cpu_ns: int = 0
    hit_len: int = 0

    def take(self, turn: Sequence[tuple[bool, int]], packed: dict[int, Any]) -> None:
        begin, finish, running = self.cache.begin, self.cache.finish, self.running
        start = time.thread_time_ns()
        for begins, i in turn:
            if begins:
                hit_len, running[i] = begin(packed[i])
                self.hit_len += hit_len
            else:
                finish(running.pop(i))
        self.cpu_ns += time.thread_time_ns() - start


def replay(
    caches: Sequence[CacheUnderTest], trace: Sequence[TraceRequest], *, in_flight: int, seed: int
) -> list[Replayed]:
    """Put a trace through caches in turns."""
    sides, order = [_Side(cache) for cache in caches], random.Random(seed)
    for turn in turns_of(events_of(len(trace), in_flight=in_flight, seed=seed)):
        prompts = {i: prompt_tokens(trace[i]) for begins, i in turn if begins}
        packed = [{i: side.cache.pack(tokens) for i, tokens in prompts.items()} for side in sides]
        for k in order.sample(range(len(sides)), len(sides)):
            sides[k].take(turn, packed[k])
    total = sum(request.prompt_len for request in trace)
    replayed = []
    for side in sides:
        side.cache.check()
        replayed.append(Replayed(side.cpu_ns / 1e3 / len(trace), side.hit_len / total))
    return replayed
