"""The host tier of a gang on several nodes: one owner and one arena per node, used as one tier.

    node 0   arena: catalog, slabs of ranks 0 1   <- owner <-+
    node 1   arena:          slabs of ranks 2 3   <- owner <-+-- decider, on node 0: calls all concurrently

A page has rows on every node, so it is present only if all nodes have it. Nodes are numbered by their lowest rank; the
decider is on the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from raycache.cache.keys import DIGEST_BYTES
from raycache.cache.storage_commands import (
    NOTHING_LISTED,
    CommandKind,
    Fetch,
    Found,
    Outcome,
    StorageCommand,
    StorageResult,
)
from raycache.deployment.deployment import Deployment
from raycache.errors import EngineStoppedError, RankLostError
from raycache.host.plan import host_sizes
from raycache.host.service import Opened
from raycache.host.spec import HostSpec, host_spec

_GONE_TIMEOUT_S = 60.0
"""How long to wait for ranks of the previous gang to die, before memory that they have mapped is released."""
_WORST_LAST = list(Fetch)

S = TypeVar("S")
T = TypeVar("T")

Work = Callable[[StorageCommand], StorageResult]
"""Executes a storage command; raises OSError if the storage or its owner cannot be reached."""


class Owner(Protocol):
    """The owner of one node's host tier: a `HostService`, or a proxy for one on another node."""

    def spec(self) -> HostSpec | None:
        """Spec of the open arena, or None."""

    def budget(self, host_memory: str) -> int:
        """Bytes available for the host tier. Raises ConfigError if the configured size exceeds the node's memory."""

    def are_ranks_gone(self, timeout_s: float) -> bool:
        """Wait until no process can move rows in the arena; returns whether that is so."""

    def drop(self) -> None:
        """Release arena and storage."""

    def open(self, spec: HostSpec, *, epoch: int) -> Opened:
        """Make the arena, or keep the open one if it is compatible. Raises ConfigError."""

    def work(self, command: StorageCommand) -> StorageResult:
        """Execute one command of a storage lane. Raises OSError."""


def open_all(
    owners: Sequence[Owner], deployment: Deployment, *, epoch: int, nodes: tuple[int, ...] = ()
) -> list[Opened]:
    """Open one arena on every node: the existing ones if all are compatible, else new ones.

    If one node has lost its arena, the others are of no use: every page has rows on all nodes.

    Args:
        owners: one per node.
        deployment: must have a host tier.
        epoch: the calling decider's epoch, above all former ones.
        nodes: index of each rank's node; may be empty with one node.
    Raises:
        ConfigError: a node has too little memory, or the storage cannot be opened.
        RankLostError: ranks of the previous gang do not end.
        EngineStoppedError: an arena was lost while others were opened.
    """
    places = nodes if len(owners) > 1 else ()
    found = _of_all(owners, lambda owner, _: owner.spec())
    known = next((spec for spec in found if spec is not None), None)

    def wanted(node: int, sizes: Mapping[str, int]) -> HostSpec:
        at = node if places else None
        spec = host_spec(deployment, sizes=sizes, nodes=places, node=at)
        # A different storage may have been attached since the start.
        return spec if known is None else replace(spec, storage=known.storage, storage_bytes=known.storage_bytes)

    def open_with(sizes: Mapping[str, int]) -> list[Opened]:
        return _of_all(owners, lambda owner, node: owner.open(wanted(node, sizes), epoch=epoch))

    if known is not None:
        if all(spec is not None and _suits(spec, wanted(node, known.sizes)) for node, spec in enumerate(found)):
            opened = open_with(known.sizes)
            if len({each.is_fresh for each in opened}) == 1:
                return opened
        if not are_all_gone(owners, timeout_s=_GONE_TIMEOUT_S):
            cause = f"ranks of the previous gang still use the host tier after {_GONE_TIMEOUT_S:.0f} s"
            raise RankLostError(-1, "unknown", 0, cause)
        _of_all(owners, lambda owner, _: owner.drop())
    budgets = _of_all(owners, lambda owner, _: owner.budget(deployment.config.host_memory))
    opened = open_with(host_sizes(deployment, budgets=budgets, nodes=places))
    if not all(each.is_fresh for each in opened):
        raise EngineStoppedError(
            "a node's host tier reappeared while the others were recreated; start the engine again"
        )
    return opened


def are_all_gone(owners: Sequence[Owner], *, timeout_s: float) -> bool:
    """Wait until no process on any node can move rows in its arena; returns whether that is so."""
    return all(_of_all(owners, lambda owner, _: owner.are_ranks_gone(timeout_s)))


def work_on_all(works: Sequence[Work]) -> Work:
    """Combine the `work` functions of all nodes' owners into one.

    It raises OSError if any owner is away: then nothing is found, fetched or stored on any node.
    """
    return works[0] if len(works) == 1 else partial(_work_on_all, works)


def _suits(spec: HostSpec, wanted: HostSpec) -> bool:
    return spec.suits(wanted) and spec.sizes == wanted.sizes


def _work_on_all(works: Sequence[Work], command: StorageCommand) -> StorageResult:
    results = _of_all(works, lambda work, node: work(command))
    for result in results:
        if result.outcome is not Outcome.DONE:
            return command.not_done(result.outcome, result.error)
    joined = replace(
        results[0],
        seconds=max(result.seconds for result in results),
        num_bytes=sum(result.num_bytes for result in results),
    )
    match command.kind:
        case CommandKind.FIND:
            return replace(joined, found=_found_by_all(works, command, [result.found for result in results]))
        case CommandKind.FETCH:
            fetches = zip(*(result.fetches for result in results), strict=True)
            return replace(joined, fetches=tuple(max(each, key=_WORST_LAST.index) for each in fetches))
        case CommandKind.LIST:
            return replace(joined, listed=NOTHING_LISTED)  # versions of several storages cannot be told apart
        case CommandKind.PERSIST:
            stored = zip(*(result.stored for result in results), strict=True)
            return replace(joined, stored=bytes(map(all, stored)))


def _found_by_all(works: Sequence[Work], command: StorageCommand, found: Sequence[Found]) -> Found:
    """Find how much of a prefix all nodes have, and a length from which all of them can resume: nodes with a longer one
    are asked again for a length up to the shortest, until all agree."""
    num_pages = min(each.num_pages for each in found)
    is_foreign = any(each.is_foreign for each in found if each.num_pages == num_pages)
    points = [each.point_pages for each in found]
    while (shortest := min(points)) < max(points):
        if not shortest or time.monotonic() >= command.deadline_s:
            return Found(num_pages, 0, is_foreign)
        longer = [node for node, length in enumerate(points) if length > shortest]
        less = replace(command, digests=command.digests[: shortest * DIGEST_BYTES])
        results = _of_all([partial(works[node], less) for node in longer], lambda ask, _: ask())
        for node, result in zip(longer, results, strict=True):
            points[node] = result.found.point_pages  # 0 if the command was not done
    return Found(num_pages, points[0], is_foreign)


def _of_all(items: Sequence[S], ask: Callable[[S, int], T]) -> list[T]:
    """Call `ask` for all (item, index) concurrently; once all have ended, return results or raise the first error."""
    with ThreadPoolExecutor(max(len(items), 1)) as pool:
        return list(pool.map(ask, items, range(len(items))))
