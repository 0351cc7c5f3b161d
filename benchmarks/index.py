"""Speed of the prefix index: the radix tree with its allocator, over a trace and in its single operations.

    python -m benchmarks.index conversation_trace.jsonl                     a trace of Mooncake's format, see README.md
    python -m benchmarks.index conversation_trace.jsonl --peer FOLDER       and SGLang's index beside it, in turns
    python -m benchmarks.index                                              a trace that it makes itself

Everything is CPU time of one thread. A request of the replay is a match, a lock, room made by eviction, and, once
`--in-flight` requests run, an insert and a release of one of them; the seed says of which. With a peer, both get the
same events, some hundreds at a time, in an order that the seed says too.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# One thread, or the time of a spinning pool of threads is measured too; numpy asks when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from benchmarks.figures import write_json
from benchmarks.trace import TRACE_BLOCK, TraceRequest, read_trace, synthetic_trace
from raycache.cache.tree import PrefixHandle, RadixTree
from raycache.memory.pages import PageAllocator, PageIds

PAGE = 64
_VOCABULARY = 150_000
_EVENTS_PER_TURN = 512
_MOST_RUNNING = 1_200_000
"""Tokens of `--in-flight` prompts of the longest kind: what a device below a large host tier must hold."""
Tokens = npt.NDArray[np.int32]


class CacheUnderTest(Protocol):
    """What a replay needs. Another cache, or another set of tiers, is another one of these."""

    name: str

    def pack(self, tokens: Tokens) -> Any: ...

    def begin(self, tokens: Any) -> tuple[int, Any]: ...

    def finish(self, running: Any) -> None: ...

    @property
    def num_cached(self) -> int: ...

    def num_bytes(self) -> int: ...

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
        num_known = self.tree.extend(handle, tokens, pages, now=self._now)
        self.pages.free(pages[:num_known])
        handle.release()

    @property
    def num_cached(self) -> int:
        """Tokens that it caches."""
        return self.tree.num_cached * PAGE

    def num_bytes(self) -> int:
        """Memory of everything that it keeps about what is cached."""
        return bytes_of(self.tree) + bytes_of(self.pages)

    def check(self) -> None:
        """Assert that no page is lost, when nothing runs."""
        self.tree.check()
        self.pages.check(in_use=np.empty(0, np.intp), cached=self.tree.trie.pages())


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
    """Some hundreds of events at a time, so that what is timed is not cold each time."""
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
        bytes_per_token: memory of everything that the cache keeps, per cached token; 0.0 if it cannot be told.
    """

    us_per_request: float
    hit_rate: float
    bytes_per_token: float


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
        size = side.cache.num_bytes() / side.cache.num_cached
        replayed.append(Replayed(side.cpu_ns / 1e3 / len(trace), side.hit_len / total, size))
    return replayed


def bytes_of(thing: object) -> int:
    """Memory of an object and all that it refers to, but not of what the program shares: types, modules, functions."""
    seen, waiting, total = set[int](), [thing], 0
    shared = (type, type(sys), type(bytes_of), type(None), bool, np.dtype)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, shared):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, np.ndarray):
            waiting.append(one.base)  # a view has no bytes of its own
        waiting.extend(gc.get_referents(one))
    return total


# --- single operations ------------------------------------------------------------------------------------------------


def best_us(once: Callable[[], object], *, repeats: int) -> float:
    """CPU time of the median of `repeats` calls, in microseconds."""
    times = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        once()
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / 1e3


def drawn(num_tokens: int, *, seed: int = 0) -> bytes:
    """Packed tokens at random."""
    return np.random.default_rng(seed).integers(0, _VOCABULARY, num_tokens, dtype=np.int32).tobytes()


def cached(tree: RadixTree, tokens: bytes, pages: PageIds, *, now: int = 0) -> PrefixHandle:
    """Put a prompt into a tree; the caller releases the handle."""
    handle = tree.match(tokens, now=now)
    tree.extend(handle, tokens, pages[handle.length // tree.page_size :], now=now)
    return handle


def match_times(num_tokens: int, *, run_tokens: int) -> dict[str, float]:
    """Microseconds of a match of a cached prompt, in runs of `run_tokens`, and of comparing the same bytes."""
    tree, tokens = RadixTree(PAGE), drawn(num_tokens)
    for end in range(run_tokens, num_tokens + run_tokens, run_tokens):
        cached(
            tree, tokens[: end * 4] + drawn(PAGE, seed=end), np.arange(end // PAGE + 1, dtype=np.intp) + end
        ).release()
    prompt, same, times = bytes(bytearray(tokens + drawn(PAGE, seed=1))), bytes(bytearray(tokens)), {}
    for name, once in {"match": lambda: tree.match(prompt, now=1).release(), "memcmp": lambda: same == tokens}.items():
        times[name] = best_us(once, repeats=50)
    return times


def handle_times(num_tokens: int) -> dict[str, float]:
    """Microseconds of a match again and of a finish with one page more, from a handle that is held."""
    tree, num_steps = RadixTree(PAGE), 200
    tokens = drawn(num_tokens + (num_steps + 1) * PAGE)
    handle = cached(tree, tokens[: num_tokens * 4], np.arange(num_tokens // PAGE, dtype=np.intp))
    pages = iter(np.arange(num_steps, dtype=np.intp)[:, None] + num_tokens // PAGE)
    prompt = tokens[: num_tokens * 4 + 4]
    again = best_us(lambda: tree.rematch(handle, prompt, now=1), repeats=num_steps)
    return {
        "rematch": again,
        "extend by a page": best_us(lambda: tree.extend(handle, tokens, next(pages), now=1), repeats=num_steps),
    }


def evict_time(num_leaves: int, *, page_size: int = 4, batch: int = 500) -> float:
    """Microseconds to evict one leaf of many that were used in random order."""
    tree, draw = RadixTree(page_size), np.random.default_rng(0)
    prompts = np.arange(num_leaves * page_size, dtype=np.int32).reshape(-1, page_size)
    for page, now in enumerate(draw.permutation(num_leaves).tolist()):
        cached(tree, prompts[page].tobytes(), np.array([page], np.intp), now=now).release()
    return best_us(lambda: [tree.evict(1) for _ in range(batch)], repeats=min(9, num_leaves // batch)) / batch


def page_time(num_tokens: int, *, cached_tokens: int) -> float:
    """Microseconds per page to match, make room for, insert and release a prompt in a full pool that holds others."""
    cache = TreeCache(num_tokens=cached_tokens)
    prompt_len = 12_000
    for i in range(-(-cached_tokens // prompt_len) + 1):
        cache.finish(cache.begin(drawn(prompt_len, seed=i))[1])
    prompts = iter([drawn(num_tokens, seed=-1 - i & 0xFFFFFFFF) for i in range(5)])
    return best_us(lambda: cache.finish(cache.begin(next(prompts))[1]), repeats=5) / (num_tokens // PAGE)


# --- the report -------------------------------------------------------------------------------------------------------


def report_replays(args: argparse.Namespace, make: Sequence[Callable[[int], CacheUnderTest]]) -> list[dict[str, Any]]:
    """Replays of every pool and seed, one line per cache and the median of the seeds."""
    trace = read_trace(args.trace) if args.trace else synthetic_trace(2000)
    print(f"{len(trace)} requests, {sum(request.prompt_len for request in trace):,} tokens, pages of {PAGE}\n")
    print("| pool, tokens | cache | us per request, median (by seed) | hit rate | bytes per cached token |")
    print("|---|---|---|---|---|")
    rows = []
    for num_tokens in args.pool_tokens:
        runs: dict[str, list[Replayed]] = {}
        for seed in range(args.seeds):
            caches = [one(num_tokens) for one in make]
            for cache, replayed in zip(caches, replay(caches, trace, in_flight=args.in_flight, seed=seed), strict=True):
                runs.setdefault(cache.name, []).append(replayed)
        for name, seeds in runs.items():
            times = [replayed.us_per_request for replayed in seeds]
            each = ", ".join(f"{value:.1f}" for value in times)
            size = f"{seeds[0].bytes_per_token:.2f}" if seeds[0].bytes_per_token else "not told"
            hits = f"{statistics.median(replayed.hit_rate for replayed in seeds):.2%}"
            print(
                f"| {num_tokens:,} | {name} | {statistics.median(times):.1f} ({each}) | {hits} | {size} |", flush=True
            )
            rows.append({"pool_tokens": num_tokens, "cache": name, "seeds": [asdict(replayed) for replayed in seeds]})
    return rows


def report_operations(*, large: bool) -> dict[str, Any]:
    """Single operations; the largest trees need 2 GB."""
    lengths = (65_536, 262_144, 1_048_576)
    figures: dict[str, Any] = {"match": {}, "handle": {}, "evict": {}, "page": {}}
    print("\n| match of a cached prompt, tokens | in one run, by memcmp | in runs of 4,096, by memcmp | memcmp, us |")
    print("|---|---|---|---|")
    for length in lengths:
        whole, runs = match_times(length, run_tokens=length), match_times(length, run_tokens=4096)
        ratios = [times["match"] / times["memcmp"] for times in (whole, runs)]
        figures["match"][length] = {"one run": whole, "runs": runs}
        print(f"| {length:,} | {ratios[0]:.2f} | {ratios[1]:.2f} | {whole['memcmp']:.1f} |", flush=True)
    print("\n| from a held handle, tokens | match again, us | extend by a page, us |\n|---|---|---|")
    for length in (1024, *lengths):
        figures["handle"][length] = times = handle_times(length)
        print(f"| {length:,} | {times['rematch']:.2f} | {times['extend by a page']:.2f} |", flush=True)
    print("\n| evict one leaf of | us |\n|---|---|")
    for count in (1000, 100_000, 1_000_000) if large else (1000, 100_000):
        figures["evict"][count] = evict_time(count)
        print(f"| {count:,} | {figures['evict'][count]:.2f} |", flush=True)
    pools = (2_600_000, 25_600_000) if large else (2_600_000,)
    print("\n| prompt, tokens | " + " | ".join(f"us per page, {pool:,} tokens cached" for pool in pools) + " |")
    print("|---|" + "---|" * len(pools))
    for length in (1024, 16_384, *lengths):
        figures["page"][length] = times_by_pool = [page_time(length, cached_tokens=pool) for pool in pools]
        print(f"| {length:,} | " + " | ".join(f"{value:.3f}" for value in times_by_pool) + " |", flush=True)
    return figures


def main() -> None:
    """Read the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--pool-tokens", type=int, nargs="+", default=[2_600_000, 25_600_000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=8, help="requests that run at once")
    parser.add_argument("--peer", type=Path, help="folder with an unpacked wheel of sglang")
    parser.add_argument(
        "--tiers", action="store_true", help="with a host tier below the device, and with a storage too"
    )
    parser.add_argument("--only", choices=("replay", "operations"))
    parser.add_argument("--small", action="store_true", help="leave out what needs more than 1 GB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    make: list[Callable[[int], CacheUnderTest]] = [lambda num_tokens: TreeCache(num_tokens=num_tokens)]
    if args.tiers:
        from benchmarks.index_tiers import TiersCache

        tiers = partial(TiersCache, page_size=PAGE, running_tokens=_MOST_RUNNING)
        make.append(lambda num_tokens: tiers(num_tokens=num_tokens))
        make.append(lambda num_tokens: tiers(num_tokens=num_tokens, has_storage=True))
    if args.peer:
        from benchmarks.index_peer import PeerCache, load_peer  # needs torch and the peer

        extension = load_peer(args.peer)
        make.append(lambda num_tokens: PeerCache(extension, num_tokens=num_tokens, page_size=PAGE))
    figures: dict[str, Any] = {}
    if args.only != "operations":
        figures["replay"] = report_replays(args, make)
    if args.only != "replay":
        figures["operations"] = report_operations(large=not args.small)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
