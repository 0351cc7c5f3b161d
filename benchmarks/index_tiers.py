"""Device and host tier together under the replay of `benchmarks.index`: what deciding costs, without copies.

Every page is saved at once, acknowledged when its request ends, and loaded when only the host has it. The catalog is
part of it; digests come with the prompt, as from an HTTP server, unless `has_digests` is off. With `has_storage` each
prompt is looked up in a storage that finds nothing, and each page is written to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from raycache.cache.catalog import Catalog
from raycache.cache.costs import Costs
from raycache.cache.evict import Eviction
from raycache.cache.holding import Holding, Use
from raycache.cache.host_tier import HostTier
from raycache.cache.keys import PackedDigests, chain_digests
from raycache.cache.prefetches import Waiting
from raycache.cache.sequences import SequenceCache
from raycache.cache.spaces import SpaceSizes
from raycache.cache.storage_commands import CommandKind, Outcome, StorageCommand, StorageResult
from raycache.cache.storage_tier import StorageTier
from raycache.cache.transfers import PlannedLoad
from raycache.memory.component import FULL
from raycache.parallel.board import Acks

_DEVICE_SHARE = 8
"""The host holds so many times what the device does."""
_USE = Use(bytes(32))
_Prompt = tuple[bytes, PackedDigests]


class TiersCache:
    """What serves: sequences on the device, write-through to the host.

    Args:
        num_tokens: of the host tier; the device has an eighth of it, or what runs at once if that is more.
        page_size: tokens per page.
        running_tokens: most tokens that run at once.
        has_digests: whether prompts come with the digests of their pages.
        has_storage: whether there is a storage below the host.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        page_size: int,
        running_tokens: int,
        has_digests: bool = True,
        has_storage: bool = False,
    ) -> None:
        tiers = "device, host and storage tier" if has_storage else "device and host tier"
        self.name = f"RayCache, {tiers}" + ("" if has_digests else ", digests made there")
        self._has_digests = has_digests
        num_pages = num_tokens // page_size
        sizes = {FULL: num_pages}
        self._page_size = page_size
        self._memory = bytearray(Catalog.num_bytes(sizes=sizes, page_size=page_size, part_widths={}))
        catalog = Catalog(memoryview(self._memory), sizes=sizes, page_size=page_size, part_widths={})
        self._host = HostTier(SpaceSizes(num_pages, page_size), catalog=catalog, eviction=Eviction.LRU)
        device = SpaceSizes(max(num_tokens // _DEVICE_SHARE, running_tokens) // page_size, page_size)
        storage = _empty_storage(self._host) if has_storage else None
        self._cache = SequenceCache(device, is_kept=True, host=self._host, storage=storage)
        self._now = 0

    def pack(self, tokens: npt.NDArray[np.int32]) -> _Prompt:
        """The form in which it wants tokens."""
        packed, page_size = tokens.tobytes(), self._page_size
        if not self._has_digests:
            return packed, b""
        stop = len(tokens) // page_size
        return packed, chain_digests(_USE.root, packed, first=0, stop=stop, page_size=page_size)

    def begin(self, prompt: _Prompt) -> tuple[int, tuple[bytes, Holding]]:
        """Match in both tiers, plan what is loaded, make room for the rest."""
        self._now += 1
        tokens, digests = prompt
        self._look_up(tokens, digests)
        holding = self._cache.begin(tokens, is_matched=True, now=self._now, use=_USE, digests=digests)
        start = holding.start(tokens, may_load=True, now=self._now)
        assert holding.reserve(start, len(tokens) // 4) is not None, "the device is too small"
        holding.use(tokens, now=self._now)
        holding.plan_load()
        return start, (tokens, holding)

    def finish(self, running: tuple[bytes, Any]) -> None:
        """Its load has come; keep the prompt, save what the host lacks, unlock it."""
        tokens, holding = running
        if isinstance(load := holding.load, PlannedLoad):
            holding.finish_load(load, tokens, now=self._now)
        holding.advance(tokens, len(tokens) // 4, is_kept=True, is_point=False, now=self._now)
        holding.end(tokens, now=self._now)
        saves, _, _ = self._cache.transfers.take_moves()
        if saves:
            self._cache.transfers.acknowledge(Acks(saves=saves[-1].number), now=self._now)
        self._cache.storage.poll(now=self._now, now_s=0.0)

    @property
    def num_cached(self) -> int:
        """Tokens in the host tier, which has what the device has."""
        return int(self._host.counts()["pages_cached"]) * self._page_size

    def num_bytes(self) -> int:
        """Memory of everything that both tiers keep about what is cached, the catalog's copy of the tokens included."""
        from benchmarks.index import bytes_of  # the benchmark that uses this

        return bytes_of(self._cache)

    def check(self) -> None:
        """Assert that no page is lost, when nothing runs."""
        self._cache.check([])

    def _look_up(self, tokens: bytes, digests: PackedDigests) -> None:
        """What is done when a request is queued: search the storage for what the device lacks."""
        cache = self._cache
        if not cache.storage.is_present:
            return
        if cache.device_len(tokens, use=_USE, now=self._now) < cache.reusable_len(len(tokens) // 4):
            owner = f"request {self._now}"
            prefetch = cache.storage.start(owner, tokens, root=_USE.root, now=self._now, now_s=0.0, digests=digests)
            cache.storage.poll(now=self._now, now_s=0.0)
            if prefetch is not None:
                cache.storage.abandon(prefetch)


class _EmptyStorage:
    """Finds nothing and stores at once."""

    def __init__(self) -> None:
        self._results: list[StorageResult] = []

    def post(self, command: StorageCommand) -> None:
        stored = b"\x01" * len(command.units) if command.kind is CommandKind.PERSIST else b""
        result = StorageResult(command.number, command.kind, command.owner, Outcome.DONE, stored=stored)
        self._results.append(result)

    def results(self) -> list[StorageResult]:
        results, self._results = self._results, []
        return results

    def cancel(self, owner: str) -> None:
        pass

    def cancel_kind(self, kind: CommandKind) -> None:
        pass

    def wait(self, timeout_s: float) -> bool:
        return bool(self._results)

    def close(self, timeout_s: float) -> bool:
        return True


def _empty_storage(host: HostTier) -> StorageTier:
    return StorageTier(host, _EmptyStorage(), waiting=Waiting.TIMEOUT, timeout_s=1.0, share=0.5, costs=Costs())
