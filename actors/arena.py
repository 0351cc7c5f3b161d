"""The owner of a node's host tier as an actor of its own, that outlives engine and ranks.

Ray starts it again when it dies; the one after finds arena and storage in its directory (raycache/engine/
host_directory.py). Until then its callers have misses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import ActorLostError, answer_now
from raycache.cache.storage.orders import StorageAnswer, StorageOrder
from raycache.config import Config
from raycache.engine import host_directory
from raycache.engine.host_service import HostService, HostSpec
from raycache.errors import ConfigError

OWNER = "the arena's owner"
"""What messages call it."""


class ArenaActor:
    """A `HostService`; its methods are those of it.

    Args:
        directory: for its files.
    """

    def __init__(self, directory: Path) -> None:
        self._service = HostService(directory)

    def __repr__(self) -> str:
        """What the Ray dashboard and logs call it."""
        return "host tier"

    def sizes(self) -> Mapping[str, int]:
        return self._service.sizes

    def open(self, spec: HostSpec, epoch: int) -> tuple[Path, HostSpec]:
        """Path of the arena's file, and what is open."""
        return self._service.path, self._service.open(spec, epoch=epoch)

    def attach(self, url: str) -> str:
        return self._service.attach(url)

    def detach(self) -> str:
        return self._service.detach()

    def resize(self, max_bytes: int) -> None:
        self._service.resize(max_bytes)

    def close(self) -> None:
        self._service.close()

    @ray.method(concurrency_group="work")
    def work(self, order: StorageOrder) -> StorageAnswer:
        return self._service.work(order)

    @ray.method(concurrency_group="long")
    def scrub(self) -> dict[str, Any]:
        return self._service.scrub()

    @ray.method(concurrency_group="long")
    def clear(self) -> None:
        self._service.clear()

    @ray.method(concurrency_group="ask")
    def status(self) -> dict[str, Any]:
        return self._service.status()


def start_arena(config: Config, *, node: str) -> Any:
    """Create the owner on a node.

    Args:
        config: of the service.
        node: id of the node that the ranks are on.
    """
    options: dict[str, Any] = {
        "concurrency_groups": {"work": config.storage_lanes, "long": 2, "ask": 1},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    kind: Any = ray.remote(num_cpus=0, max_restarts=-1, **options)(ArenaActor)
    return kind.remote(host_directory.SHARED_MEMORY / host_directory.new_name())


def stop_arena(actor: Any, *, timeout_s: float) -> None:
    """End the owner; nothing of the host tier is left, or soon will be."""
    with contextlib.suppress(ActorLostError):  # then the directory's watcher removes what it has left
        answer_now(actor.close.remote(), of=OWNER, timeout_s=timeout_s)
    ray.kill(actor)


def node_of(places: PlacementGroup) -> str:
    """Id of the node that all places are on.

    Raises:
        ConfigError: they are on several; an arena is memory of one.
    """
    nodes = set(placement_group_table(places)["bundles_to_node_id"].values())
    if len(nodes) > 1:
        raise ConfigError(
            f"the ranks are on {len(nodes)} nodes, and a host tier is memory of one; use a split that fits a node, or "
            "host_memory=0"
        )
    return str(nodes.pop())


def storage_work(actor: Any, *, timeout_s: float) -> Callable[[StorageOrder], StorageAnswer]:
    """What carries out orders of the storage lanes, from any thread.

    Args:
        actor: that owns the arena.
        timeout_s: after which it counts as away.
    Returns:
        Raises OSError while the owner or its storage is away.
    """

    def work(order: StorageOrder) -> StorageAnswer:
        try:
            found: StorageAnswer = answer_now(actor.work.remote(order), of=OWNER, timeout_s=timeout_s)
        except (ActorLostError, RayTaskError) as cause:
            raise OSError(str(cause)) from cause
        return found

    return work
