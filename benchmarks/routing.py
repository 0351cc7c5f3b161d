"""Routing over replicas, simulated: hits and balance of each policy against a router that knows the caches.

    python -m benchmarks.routing --trace conversation_trace.jsonl --replicas 4

A simulated replica has an exact cache (leaves of the prefix tree leave it first, least recently used ones first of
those), computes prompts one after the other and writes outputs beside them. Unit of everything is the trace's block of
512 tokens: a page is one block, and a block's id stands for it as a token.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.figures import percentile, write_json
from benchmarks.trace import TRACE_BLOCK, TraceRequest, read_trace, synthetic_trace
from raycache.routing.choice import Route, Router
from raycache.types import FinishReason, GenerateRequest, Miss, RequestOutput, SamplingParams

POLICIES = ("random", "round_robin", "load", "prefix", "oracle")


class ExactCache:
    """Pages of one replica as a tree, bounded; the slow and exact twin of what the router believes.

    Args:
        capacity: pages.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._last_use: dict[int, int] = {}
        self._parent: dict[int, int | None] = {}
        self._num_children: dict[int, int] = {}
        self._leaves: list[tuple[int, int]] = []
        self._clock = 0

    def hit(self, prompt: Sequence[int]) -> int:
        """Pages of the longest prefix that is there, without the last one: a token is left to compute."""
        return next((length for length, page in enumerate(prompt[:-1]) if page not in self._last_use), len(prompt) - 1)

    def add(self, prompt: Sequence[int]) -> None:
        """Have all pages of a prompt; what is used least recently and has nothing behind it goes."""
        self._clock += 1
        for parent, page in itertools.pairwise((None, *prompt)):
            assert page is not None, "pages have ids"
            if page not in self._last_use:
                self._num_children[page], self._parent[page] = 0, parent
                if parent is not None:
                    self._num_children[parent] += 1
            self._last_use[page] = self._clock
        heapq.heappush(self._leaves, (self._clock, prompt[-1]))
        while len(self._last_use) > self._capacity:
            self._evict()

    def _evict(self) -> None:
        while True:
            use, page = heapq.heappop(self._leaves)
            if self._last_use.get(page) == use and not self._num_children[page]:
                break
        parent = self._parent[page]
        del self._last_use[page], self._num_children[page], self._parent[page]
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                heapq.heappush(self._leaves, (self._last_use[parent], parent))


@dataclass
class SimulatedReplica:
    """An engine: prompts are computed one after the other, outputs written beside them.

    Attributes:
        cache: of it.
        free_at_s: when the prompts that it has are computed.
        computed: blocks of prompts computed.
    """

    cache: ExactCache
    free_at_s: float = 0.0
    computed: float = 0.0


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        hits, prompts: blocks reused, and asked for.
        first_token_s: times to the first token.
        computed: blocks computed by each replica.
    """

    hits: int = 0
    prompts: int = 0
    first_token_s: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the prompts' blocks that were reused."""
        return self.hits / max(1, self.prompts)

    @property
    def imbalance(self) -> float:
        """Most that a replica computed, over the mean."""
        return max(self.computed) * len(self.computed) / max(1e-9, sum(self.computed))


def simulate(
    requests: Sequence[TraceRequest],
    policy: str,
    *,
    num_replicas: int,
    capacity: int,
    blocks_per_s: float,
    output_block_s: float,
) -> Outcome:
    """Send a trace through a router.

    Args:
        requests: by time.
        policy: one of POLICIES.
        num_replicas: of equal ones.
        capacity: blocks that each caches.
        blocks_per_s: that one computes of prompts.
        output_block_s: seconds that a block of output takes.
    """
    replicas = [SimulatedReplica(ExactCache(capacity)) for _ in range(num_replicas)]
    router = _Chooser(policy, replicas, capacity=capacity, blocks_per_s=blocks_per_s)
    outcome = Outcome()
    events: list[tuple[float, int, Callable[[], None]]] = []
    order = itertools.count()
    for number, request in enumerate(requests):
        while events and events[0][0] <= request.time_s:
            heapq.heappop(events)[2]()
        prompt = [block + 1 for block in request.blocks]
        route = router.choose(str(number), prompt, now_s=request.time_s)
        replica = replicas[int(route.replica)]
        hit = replica.cache.hit(prompt)
        work = len(prompt) - hit
        replica.cache.add(prompt)
        replica.computed += work
        replica.free_at_s = max(replica.free_at_s, request.time_s) + work / blocks_per_s
        outcome.hits, outcome.prompts = outcome.hits + hit, outcome.prompts + len(prompt)
        outcome.first_token_s.append(replica.free_at_s - request.time_s)
        miss = Miss.NONE if work == 1 else Miss.NEVER_SEEN
        first = RequestOutput(str(number), (0,), cached_tokens=hit, miss=miss)
        num_output = max(1, round(request.output_len / TRACE_BLOCK))
        last = RequestOutput(str(number), (0,) * (num_output - 1), finish_reason=FinishReason.LENGTH)
        end_s = replica.free_at_s + num_output * output_block_s
        heapq.heappush(events, (replica.free_at_s, next(order), partial(router.first, route, first)))
        heapq.heappush(events, (end_s, next(order), partial(router.last, route, last)))
    outcome.computed = [replica.computed for replica in replicas]
    return outcome


class _Chooser:
    """The project's router, or one to compare it with."""

    def __init__(
        self, policy: str, replicas: Sequence[SimulatedReplica], *, capacity: int, blocks_per_s: float
    ) -> None:
        self._policy, self._replicas, self._blocks_per_s = policy, replicas, blocks_per_s
        self._draw = random.Random(0)
        self._router = Router(policy if policy in ("load", "round_robin") else "prefix", page_size=1)
        self._names = [str(index) for index in range(len(replicas))]
        for name in self._names:
            self._router.add(name, num_pages=capacity)

    def choose(self, name: str, prompt: list[int], *, now_s: float) -> Route:
        among = self._names
        match self._policy:
            case "random":
                among = [self._draw.choice(self._names)]
            case "oracle":
                among = [min(self._names, key=lambda each: self._blocks_until_first_token(int(each), prompt, now_s))]
        return self._router.choose(GenerateRequest(name, prompt, SamplingParams()), among)

    def first(self, route: Route, output: RequestOutput) -> None:
        self._router.note(route, output)

    def last(self, route: Route, output: RequestOutput) -> None:
        self._router.note(route, output)
        self._router.end(route)

    def _blocks_until_first_token(self, index: int, prompt: Sequence[int], now_s: float) -> tuple[float, float]:
        replica = self._replicas[index]
        queue = max(0.0, replica.free_at_s - now_s) * self._blocks_per_s
        return queue + len(prompt) - replica.cache.hit(prompt), replica.computed


def main() -> int:
    options = _options()
    requests = synthetic_trace(options.requests) if options.synthetic else read_trace(options.trace)
    if options.requests:
        requests = requests[: options.requests]
    seconds = requests[-1].time_s - requests[0].time_s
    blocks = sum(len(request.blocks) for request in requests)
    figures = []
    print(f"{len(requests)} requests, {blocks} blocks, {seconds:.0f} s")
    print(f"{'replicas':>8} {'blocks each':>11} {'busy':>5}  " + "  ".join(f"{name:>24}" for name in POLICIES))
    print(f"{'':28}" + "  ".join(f"{'hits   max/mean  p90 s':>24}" for _ in POLICIES))
    for num_replicas, capacity, busy in itertools.product(options.replicas, options.capacity, options.busy):
        # So fast that a replica would be busy for this share of the time if nothing was reused.
        blocks_per_s = blocks / seconds / num_replicas / busy
        cells = []
        for policy in POLICIES:
            outcome = simulate(
                requests,
                policy,
                num_replicas=num_replicas,
                capacity=capacity,
                blocks_per_s=blocks_per_s,
                output_block_s=10.0,
            )
            found = {
                "policy": policy,
                "replicas": num_replicas,
                "capacity": capacity,
                "busy": busy,
                "hits": outcome.share,
                "imbalance": outcome.imbalance,
                "first_token_p90_s": percentile(outcome.first_token_s, 90),
            }
            figures.append(found)
            cells.append(f"{outcome.share:8.1%} {outcome.imbalance:7.2f} {found['first_token_p90_s']:7.2f}")
        print(f"{num_replicas:8} {capacity:11} {busy:5.1f}  " + "  ".join(cells), flush=True)
    if options.json:
        write_json(options.json, {"requests": len(requests), "runs": figures})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", type=Path, help="of the format that README.md names")
    source.add_argument("--synthetic", action="store_true", help="make a trace instead")
    parser.add_argument("--requests", type=int, default=0, help="only the first ones; of a synthetic trace: all")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4], metavar="N")
    parser.add_argument("--capacity", type=int, nargs="+", default=[4000], metavar="N", help="blocks that each caches")
    parser.add_argument("--busy", type=float, nargs="+", default=[0.8], help="load if nothing was reused")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    options = parser.parse_args()
    if options.synthetic and not options.requests:
        options.requests = 2000
    return options


if __name__ == "__main__":
    sys.exit(main())
