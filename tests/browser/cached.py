"""A server over a scripted engine with real prefix trees, to look at in a browser."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raycache.api.tokenizer import Tokenizer
from raycache.cache.survey import Wanted, largest_prefixes
from raycache.cache.tree import RadixTree
from raycache.types import CacheCommand, EngineInfo, EngineStats, packed
from tests.unit.scripted import ScriptedEngine, over_port

PAGE = 16
_PAGE_BYTES = 2**20


@dataclass
class Load:
    """Counters that grow with time, or stand still."""

    per_s: float = 0.0

    def __call__(self, rate: float) -> int:
        return int(rate * self.per_s * (time.monotonic() % 10_000))


class CachedEngine(ScriptedEngine):
    """Keeps what was put into its trees, and what it is asked.

    Attributes:
        trees: tier -> prefixes, by salt.
    """

    def __init__(self, tokenizer: Tokenizer, *, per_s: float = 0.0, delay_s: float = 0.0) -> None:
        super().__init__(tokenizer, context=100_000, delay_s=delay_s)
        self._tokenizer = tokenizer
        self.trees = {tier: RadixTree(PAGE) for tier in ("device", "host")}
        self._step = self._page = 0
        self._load = Load(per_s)

    def put(self, *texts: str, salt: str = "", tiers: Sequence[str] = ("device", "host")) -> None:
        """Cache the whole pages of a prompt, which grows by one text after the other."""
        tokens: list[int] = []
        for text in texts:
            self._step += 1
            tokens += self._tokenizer.encode(text, add_special_tokens=False)
            whole = packed(tokens[: len(tokens) // PAGE * PAGE])
            for tier in tiers:
                tree = self.trees[tier]
                handle = tree.match(whole + packed([0]), now=self._step, root=_root(salt))
                count = len(whole) // 4 // PAGE - handle.length // PAGE
                if count:
                    self._page += count
                    pages = np.arange(self._page - count, self._page, dtype=np.int32)
                    tree.extend(handle, whole, pages, now=self._step)
                handle.release()

    async def info(self) -> EngineInfo:
        ranks = [
            {
                "rank": rank,
                "coords": f"pp=0 cp=0 tp={rank}",
                "node": "10.0.0.5",
                "device": f"cuda:{rank}",
                "pages": 4096,
            }
            for rank in range(4)
        ]
        sizes = {"tokens": 4096 * PAGE, "bytes": 4096 * _PAGE_BYTES, "components": {"full": 4096 * _PAGE_BYTES}}
        tiers = dict.fromkeys(self.trees, sizes)
        return replace(await super().info(), ranks=tuple(ranks), tiers=tiers, page_size=PAGE)

    async def stats(self) -> EngineStats:
        load, cached = self._load, self.trees["device"].num_cached
        prompts = load(9000)
        reused = load(7000) + int(900 * load.per_s * np.sin(time.monotonic() / 3))
        moved = {"saved_bytes": load(3e7), "save_s": load(12) / 100, "loaded_bytes": load(9e6), "load_s": load(4) / 100}
        stored = {
            "objects": 812,
            "bytes_used": 3.1e11,
            "bytes_limit": 5e11,
            "persisted_bytes": load(2e7),
            "persist_s": load(30) / 100,
        }
        host = {"pages_total": 4096, "pages_free": 4096 - self.trees["host"].num_cached, **moved}
        shown: dict[str, Any] = dict(
            steps=self._step,
            running=int(load.per_s * (9 + 4 * np.sin(time.monotonic() / 5))),
            waiting=int(load.per_s * max(0, 3 * np.sin(time.monotonic() / 5))),
            prompt_tokens=prompts,
            cached_tokens=reused,
            cached_by_tier={"device": reused * 3 // 4, "host": reused // 4},
            computed_tokens=load(2100),
            output_tokens=load(640),
            pages_total=4096,
            pages_free=4096 - cached,
            pages_cached=cached,
            tiers={"host": host, "storage": {**stored, "prefetched_bytes": load(4e6), "prefetch_s": load(9) / 100}},
        )
        return replace(await super().stats(), **(shown | self.figures))

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        query = command.tree
        if query is None:
            return await super().admin(command)
        named = {_root(salt): name for salt, name in query.tenants}
        roots = list(named)
        wanted = Wanted(query.limit, query.depth, None if query.is_all else roots, named, roots[0], b"secret")
        tiers = {}
        for tier, tree in self.trees.items():
            work = largest_prefixes(tree, wanted)
            while tier not in tiers:
                try:
                    next(work)
                except StopIteration as end:
                    tiers[tier] = end.value
        return {"step": self._step, "tiers": tiers}


def _root(salt: str) -> bytes:
    return f"root of {salt}".encode()


@contextmanager
def served(engine: CachedEngine, tokenizer: Tokenizer, **settings: Any) -> Iterator[str]:
    """A server in a thread of its own; the value is its endpoint."""
    found: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def run() -> None:
        async with over_port(engine, tokenizer, **settings) as endpoint:
            found.append(endpoint)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield found[0]
    finally:
        stop.set()
        thread.join(30)
