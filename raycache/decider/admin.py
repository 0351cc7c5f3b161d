"""Runs an operator's cache commands on a serving engine, between two steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from raycache.cache.flush import Flush
from raycache.cache.holding import Use
from raycache.cache.sequences import SequenceCache
from raycache.cache.storage_tier import StorageTier
from raycache.decider.hits import explain
from raycache.errors import ConfigError
from raycache.types import TIERS, CacheAction, CacheCommand, EngineStats, Miss, packed

CommandResult = Future[Mapping[str, Any]]


def carry_out(
    command: CacheCommand, cache: SequenceCache, *, stats: EngineStats, root: bytes, now: int
) -> CommandResult:
    """Do the decider's part of a command; the storage itself belongs to the owner of the host tier.

    Args:
        stats: the engine's current counters.
        root: root digest of the command's tenant.
        now: step number, the LRU clock.
    Returns:
        The result for the operator (see `AsyncEngine.admin`); that of INSPECT and FLUSH is set once storage replies.
    Raises:
        ConfigError: the tier does not exist.
    """
    match command.kind:
        case CacheAction.INSPECT:
            return _inspect(command, cache, root=root, now=now)
        case CacheAction.CLEAR:
            return _done(_clear(command, cache))
        case CacheAction.STATUS:
            return _done({"tiers": {"device": _device(stats), **stats.tiers}, "warnings": list(stats.warnings)})
        case CacheAction.ATTACH | CacheAction.DETACH:
            _storage(cache).attach(is_attached=command.kind is CacheAction.ATTACH)
        case CacheAction.RESIZE:
            _storage(cache).blocks.want()
        case CacheAction.FLUSH:
            return _flush(command, cache)
    return _done({})


def _storage(cache: SequenceCache) -> StorageTier:
    if not isinstance(cache.storage, StorageTier):
        raise ConfigError("a storage tier needs a host tier, but there is none; set --host-memory")
    return cache.storage


def _clear(command: CacheCommand, cache: SequenceCache) -> dict[str, Any]:
    tiers = command.tiers or TIERS
    is_there = {"device": True, "host": cache.host.is_present, "storage": cache.storage.is_attached}
    if not any(is_there[tier] for tier in tiers):
        raise ConfigError(f"there is no {' or '.join(tiers)} tier to clear")
    before = cache.counts()["pages_cached"]
    cleared: dict[str, Any] = {}
    if "device" in tiers:
        cache.clear()
        cleared["device"] = before - cache.counts()["pages_cached"]
    if "host" in tiers and cache.host.is_present:
        cached = cache.host.counts()["pages_cached"]
        cache.host.clear()
        cleared["host"] = cached - cache.host.counts()["pages_cached"]
    if "storage" in tiers:
        cache.storage.attach(is_attached=cache.storage.is_attached, is_emptied=True)  # its owner empties it next
    return {"cleared_pages": cleared}


def _flush(command: CacheCommand, cache: SequenceCache) -> CommandResult:
    storage = _storage(cache)
    if not storage.is_attached:
        raise ConfigError("there is no storage tier to flush to; attach one with `raycache cache attach`")
    flush = Flush(cache, storage, deadline_s=time.monotonic() + command.timeout_s)
    storage.attend(flush.go_on)
    return flush.answer


def _device(stats: EngineStats) -> dict[str, float]:
    names = ("pages_total", "pages_free", "pages_in_use", "pages_cached", "evicted_pages", "restore_points")
    values = (
        stats.pages_total,
        stats.pages_free,
        stats.pages_in_use,
        stats.pages_cached,
        stats.evicted_pages,
        stats.restore_points,
    )
    return dict(zip(names, values, strict=True))


def _inspect(command: CacheCommand, cache: SequenceCache, *, root: bytes, now: int) -> CommandResult:
    """Match a prompt in each tier, including the tiers above it, with little effect on the eviction order."""
    tokens = packed(command.prompt)
    holding = cache.begin(tokens, is_matched=True, now=now, use=Use(root))
    device = holding.handle
    host = holding.cursor.found
    reached = {"device": device.length}
    if cache.host.is_present:
        reached["host"] = max(device.length, host.length)
    cached, wanted = max(reached.values()), cache.reusable_len(len(command.prompt))
    miss, cut_by = explain(wanted, cached, device, host, None)
    holding.end(tokens, now=now)
    if not (isinstance(cache.storage, StorageTier) and cache.storage.is_attached):
        return _done(_inspected(command, reached, miss, cut_by))
    result: CommandResult = Future()

    def take(stored: int | None) -> None:
        if stored is not None:
            reached["storage"] = max(cached, stored)
        is_all = reached.get("storage", cached) >= wanted
        result.set_result(
            _inspected(command, reached, Miss.NONE if is_all and wanted else miss, "" if is_all else cut_by)
        )

    cache.storage.find(tokens, root=root, then=take)
    return result


def _inspected(command: CacheCommand, reached: Mapping[str, int], miss: Miss, cut_by: str) -> dict[str, Any]:
    return {"prompt_tokens": len(command.prompt), "tiers": dict(reached), "cut_by": cut_by, "miss": miss}


def _done(found: Mapping[str, Any]) -> CommandResult:
    result: CommandResult = Future()
    result.set_result(found)
    return result
