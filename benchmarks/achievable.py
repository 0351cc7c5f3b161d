"""What caches of other sizes would have reused: estimates of raycache/achievable against replays of whole traces.

    python -m benchmarks.achievable conversation_trace.jsonl     a trace of Mooncake's format, see README.md
    python -m benchmarks.achievable --synthetic                  a trace that it makes itself
    python -m benchmarks.achievable --agents                     agent sessions, up to 142,000 tokens each

The cache without limits knows the pages of each block path. The replays are an LRU list of pages, and the radix tree
with its allocator as in benchmarks.index, both at five sizes. Prompts come one after the other; outputs are not kept.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from benchmarks.index import PAGE, TreeCache, bytes_of, prompt_tokens
from benchmarks.trace import TRACE_BLOCK, TraceRequest, read_trace, synthetic_trace
from raycache.achievable.prefixes import ChainedDigests, PrefixHasher, PrefixSource
from raycache.achievable.reuse import Reuse
from raycache.cache.keys import Identity, page_chain
from raycache.types import GenerateRequest, Miss, RequestOutput, packed

_PER_BLOCK = TRACE_BLOCK // PAGE
_SIZES = (1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the caches, as parts of all distinct pages."""
_BATCH = 250
_OUTPUT = RequestOutput("", (1,), miss=Miss.NEVER_SEEN)
_AGENT_TURNS, _AGENT_BLOCKS, _SYSTEM_BLOCKS = 43, 277, 24


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.achievable", description=__doc__)
    parser.add_argument("trace", metavar="FILE", type=Path, nargs="?")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--requests", type=int, default=12_031)
    parser.add_argument("--seeds", type=int, default=5, help="of the hashes that choose the sample")
    options = parser.parse_args()
    if options.agents:
        trace = agent_trace(options.requests)
    elif options.synthetic or options.trace is None:
        trace = synthetic_trace(options.requests, seed=1)
    else:
        trace = read_trace(options.trace)[: options.requests]
    report(trace, num_seeds=options.seeds)
    return 0


def report(trace: Sequence[TraceRequest], *, num_seeds: int) -> None:
    prompt_len = sum(request.prompt_len for request in trace)
    exact = Unlimited()
    for request in trace:
        exact.add(request)
    num_distinct = exact.num_pages
    sources: list[PrefixSource] = [PrefixHasher(PAGE, seed=seed) for seed in range(num_seeds)]
    reuses = [Reuse(page_size=PAGE, source=source) for source in (ChainedDigests(lambda *_: b""), *sources)]
    given_us, hashed_us = zip(*estimate(trace, reuses), strict=True)
    totals = [reuse.tallies.total for reuse in reuses]
    wanted = exact.hit_len / prompt_len
    errors = [100 * (total.achievable - wanted) for total in totals]
    print(f"{len(trace)} requests, {prompt_len:,} tokens, {num_distinct * PAGE:,} distinct, pages of {PAGE}")
    print(
        f"without limits {100 * wanted:.2f} %; estimates off by {', '.join(f'{error:+.2f}' for error in errors)}; "
        f"stated +-{100 * totals[0].error:.2f} (95 %)"
    )
    print(
        f"sample of one page in {reuses[0].sample.weight:.0f}, {bytes_of(reuses[0].sample) / 2**20:.1f} MiB; "
        f"CPU time per request: {_mean_us(given_us)} where prompts have digests, otherwise {_mean_us(hashed_us)}"
    )
    print("| cache, tokens | LRU list | estimates: mean | largest error | radix tree |")
    print("|---|---|---|---|---|")
    for num_pages in (int(num_distinct * size) for size in _SIZES):
        lru = LruPages(num_pages)
        replayed = 100 * sum(map(lru.hit_len, trace)) / prompt_len
        tree = 100 * tree_hits(trace, num_tokens=num_pages * PAGE) / prompt_len
        shares = [100 * reuse.share_at(num_pages * PAGE) for reuse in reuses]
        worst = max((share - replayed for share in shares), key=abs)
        print(
            f"| {num_pages * PAGE:,} | {replayed:.2f} % | {statistics.fmean(shares):.2f} % | {worst:+.2f} "
            f"| {tree:.2f} % |",
            flush=True,
        )


def _mean_us(batches: Sequence[float]) -> str:
    late = batches[-max(1, len(batches) // 4) :]
    return f"{statistics.fmean(batches):.0f} us (last quarter {statistics.fmean(late):.0f})"


def agent_trace(num_requests: int, *, num_at_once: int = 16, seed: int = 0) -> list[TraceRequest]:
    """Sessions below one system prompt whose prompts grow turn by turn; `num_at_once` of them take turns at random."""
    draw, ids = random.Random(seed), iter(range(10**9))
    system = tuple(islice(ids, _SYSTEM_BLOCKS))
    sessions = [list[int](system) for _ in range(num_at_once)]
    trace = []
    for number in range(num_requests):
        session = draw.choice(sessions)
        session += islice(ids, max(1, round(draw.expovariate(_AGENT_TURNS / (_AGENT_BLOCKS - _SYSTEM_BLOCKS)))))
        trace.append(TraceRequest(number, len(session) * TRACE_BLOCK, 444, tuple(session)))
        if len(session) >= _AGENT_BLOCKS:
            session[:] = system
    return trace


def estimate(trace: Sequence[TraceRequest], reuses: Sequence[Reuse]) -> Iterator[tuple[float, float]]:
    """Count a trace with each; gives the CPU time per request of the first two, in us, for each batch."""
    identity = Identity("weights", PAGE)
    for start in range(0, len(trace), _BATCH):
        prompts = [array("i", prompt_tokens(request).tobytes()) for request in trace[start : start + _BATCH]]
        requests = [GenerateRequest("", prompt, page_chain=page_chain(identity, packed(prompt))) for prompt in prompts]
        times_us = []
        for reuse in reuses:
            begin_s = time.process_time()
            for request in requests:
                with reuse.follow(request, tenant="") as watch:
                    watch.take(_OUTPUT)
            times_us.append(1e6 * (time.process_time() - begin_s) / len(requests))
        yield times_us[0], times_us[1]


class Unlimited:
    """A cache without limits: of each path of blocks, how many pages of the last one are known.

    Attributes:
        hit_len: tokens reused so far.
        num_pages: known so far.
    """

    def __init__(self) -> None:
        self._paths: dict[tuple[int, int], int] = {}  # (path above, block) -> path
        self._known: list[int] = [0]
        self.hit_len = self.num_pages = 0

    def add(self, request: TraceRequest) -> None:
        path, left, hits, is_known = 0, request.prompt_len // PAGE, 0, True
        for block in request.blocks:
            path = self._paths.setdefault((path, block), len(self._known))
            if path == len(self._known):
                self._known.append(0)
            num_pages, known = min(left, _PER_BLOCK), self._known[path]
            if is_known:
                hits += min(known, num_pages)
                is_known = known >= num_pages
            self._known[path] = max(known, num_pages)
            self.num_pages += max(0, num_pages - known)
            left -= num_pages
        self.hit_len += min(hits, (request.prompt_len - 1) // PAGE) * PAGE


class LruPages:
    """A list of pages in the order of their last use; of a prompt, the last page is used first."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._paths: dict[tuple[int, int], int] = {}

    def hit_len(self, request: TraceRequest) -> int:
        """Tokens of a prompt that are reused; its pages are kept."""
        keys, path = [], 0
        for block in request.blocks:
            path = self._paths.setdefault((path, block), len(self._paths) + 1)
            keys += [(path, page) for page in range(_PER_BLOCK)]
        del keys[request.prompt_len // PAGE :]
        most = (request.prompt_len - 1) // PAGE
        hits = next((index for index, key in enumerate(keys[:most]) if key not in self._pages), most)
        for key in reversed(keys):
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._num_pages:
            self._pages.popitem(last=False)
        return hits * PAGE


def tree_hits(trace: Sequence[TraceRequest], *, num_tokens: int) -> int:
    """Tokens that the radix tree reuses. A prompt that does not fit is not cached."""
    cache, hit_len = TreeCache(num_tokens=num_tokens), 0
    for request in trace:
        if request.prompt_len > num_tokens:
            continue
        tokens = cache.pack(prompt_tokens(request))
        found, running = cache.begin(tokens)
        cache.finish(running)
        hit_len += min(found, (request.prompt_len - 1) // PAGE * PAGE)
    return hit_len


if __name__ == "__main__":
    raise SystemExit(main())
