"""Reserves resources for all ranks of a gang on the planned nodes, and again after a node is lost."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ray
from ray._private.state import state
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycache.config import Config
from raycache.errors import ConfigError
from raycache.parallel.placement import (
    Need,
    Node,
    chosen,
    has_room,
    missing,
    need_of,
    plan,
    refuse_impossible,
    split_groups,
)

_log = logging.getLogger(__name__)
_NODE_ID = "ray.io/node-id"
_TRY_S = 1.0
"""Polling interval while waiting for free resources."""
_PIN_S = 10.0
"""For Ray to reserve resources that were just free; another job may take them first."""
_FREED_S = 5.0
"""For Ray to free removed resources."""

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """Reserved resources of all ranks; plain data, sent to the engine actor. Ends with the process that reserved them.

    Attributes:
        group: Ray placement group whose bundles are pinned to nodes, so Ray never moves one.
        bundles: bundle index per world rank.
        nodes: node id per world rank.
        addresses: node id -> address in Ray.
        need: resources per rank.
        warnings: for the operator.
    """

    config: Config
    device: str
    group: PlacementGroup
    bundles: tuple[int, ...]
    nodes: tuple[str, ...]
    addresses: Mapping[str, str]
    need: Need
    warnings: tuple[str, ...] = ()

    def options(self, rank: int, *, stands_by: bool = False) -> dict[str, Any]:
        """Ray actor options of a rank, or of one that stands by for it and takes nothing from it."""
        return {
            "num_cpus": 0 if stands_by else self.need.num_cpus,
            "num_gpus": 0 if stands_by else self.need.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundles[rank]
            ),
        }

    def remove(self) -> None:
        """Release the resources, which ends the actors that use them."""
        remove_placement_group(self.group)

    def again(self, *, excluding: AbstractSet[str], on_wait: Callable[[str], None]) -> Placement:
        """Release the resources, which ends the ranks, and reserve others.

        Args:
            excluding: ids of nodes to avoid, besides dead and draining ones.
        Raises:
            ConfigError: no suitable resources are free within start_timeout_s.
        """
        deadline = time.monotonic() + self.config.start_timeout_s
        ask = partial(_ask_head, deadline=deadline, on_wait=on_wait)
        held = {node.node_id: node for node in ask(cluster_nodes)}
        is_there = ask(lambda: placement_group_table(self.group)).get("state") == "CREATED"
        ask(self.remove)
        if is_there:
            ask(lambda: _await_freed(self, before=held))
        return _reserve(self.config, device=self.device, on_wait=on_wait, excluding=excluding, is_again=True)


def reserve(config: Config, *, device: str, on_wait: Callable[[str], None]) -> Placement:
    """Reserve resources for one gang, waiting until they are free.

    Args:
        device: "cpu" or "cuda".
        on_wait: called repeatedly with what is missing; an exception that it raises ends the wait.
    Raises:
        ConfigError: the ranks cannot fit the cluster, or did not within start_timeout_s.
    """
    return _reserve(config, device=device, on_wait=on_wait, excluding=frozenset(), is_again=False)


def cluster_nodes() -> list[Node]:
    """Return the live nodes of the cluster with their currently free resources."""
    free = state.available_resources_per_node()
    draining = state.get_draining_nodes()
    found = []
    for node in ray.nodes():
        node_id, has = node["NodeID"], node["Resources"]
        if not node["Alive"]:
            continue
        left = free.get(node_id, {})  # no entry yet for a node that has just joined
        found.append(
            Node(
                node_id=node_id,
                address=node["NodeManagerAddress"],
                hostname=node["NodeManagerHostname"],
                cpus=has.get("CPU", 0.0),
                free_cpus=left.get("CPU", 0.0),
                gpus=has.get("GPU", 0.0),
                free_gpus=left.get("GPU", 0.0),
                labels=node["Labels"],
                is_draining=node_id in draining,
            )
        )
    return found


def _reserve(
    config: Config,
    *,
    device: str,
    on_wait: Callable[[str], None],
    excluding: AbstractSet[str],
    is_again: bool,
) -> Placement:
    deadline = time.monotonic() + config.start_timeout_s
    ask = partial(_ask_head, deadline=deadline, on_wait=on_wait)
    search = ask(lambda: _Search(config, device=device, excluding=excluding, is_again=is_again))
    demand: PlacementGroup | None = None
    try:
        while True:
            nodes = ask(search.nodes)
            need = need_of(config.split, replicas=config.replicas, device=device, nodes=nodes)
            placement = ask(partial(search.take, need, nodes))
            if placement is not None:
                return placement
            lacks = search.missing(need, nodes)
            if time.monotonic() > deadline:
                raise ConfigError(f"could not place the ranks within {config.start_timeout_s:.0f} s: {lacks}")
            on_wait(lacks)
            if demand is None and not search.is_fixed:
                demand = ask(partial(_demand, need, excluding))
            if demand is None:
                time.sleep(_TRY_S)
            elif ask(partial(demand.wait, timeout_seconds=_TRY_S)):
                ask(partial(remove_placement_group, demand))
                demand = None
                time.sleep(_TRY_S / 4)  # until Ray counts it as free; it is then reserved as planned
    finally:
        if demand is not None:
            _remove(demand)


def _ask_head(call: Callable[[], T], *, deadline: float, on_wait: Callable[[str], None]) -> T:
    """Make a call to the cluster's head, retrying while the head is unreachable.

    Args:
        deadline: on the monotonic clock, when to give up.
    Raises:
        ConfigError: the head is still unreachable.
    """
    while True:
        try:
            return call()
        except (RayError, RuntimeError) as cause:
            if time.monotonic() > deadline:
                raise ConfigError(f"could not place the ranks: the cluster's head is unreachable: {cause}") from cause
            on_wait("the cluster's head is unreachable")
        time.sleep(_TRY_S)


def _remove(group: PlacementGroup) -> None:
    """Remove a placement group; failures are only logged, so that they do not hide the caller's result or error."""
    try:
        remove_placement_group(group)
    except (RayError, RuntimeError) as cause:
        _log.warning("resources stay reserved until this process ends: the cluster's head is unreachable: %s", cause)


class _Search:
    """Finds nodes for the ranks, by the placement map of the settings if there is one.

    Args:
        device: "cpu" or "cuda".
        excluding: ids of nodes to avoid.
        is_again: whether the ranks were placed before. A map that names a lost node is then ignored, so that it does
            not keep the service down.
    Raises:
        ConfigError: the ranks can never fit the cluster, or the map does not match it.
    """

    def __init__(self, config: Config, *, device: str, excluding: AbstractSet[str], is_again: bool) -> None:
        self._config, self._device, self._excluding = config, device, excluding
        self._warnings: tuple[str, ...] = ()
        self.is_fixed = config.placement != "auto"
        nodes = self.nodes()
        need = need_of(config.split, replicas=config.replicas, device=device, nodes=nodes)
        if self.is_fixed:
            try:
                chosen(config.placement, need=need, nodes=nodes)
            except ConfigError as refusal:
                if not is_again:
                    raise
                self.is_fixed = False
                self._warnings = (f"{refusal}; ranks are placed automatically",)
        if config.address == "local":
            # No node can join later.
            if not self.is_fixed:
                refuse_impossible(need, nodes)
            if device == "cuda":
                # Ray also counts GPUs that torch cannot use.
                from raycache.parallel.devices import require_gpus

                require_gpus(config.world_size)

    def nodes(self) -> list[Node]:
        return [node for node in cluster_nodes() if node.node_id not in self._excluding]

    def missing(self, need: Need, nodes: Sequence[Node]) -> str:
        ranks = chosen(self._config.placement, need=need, nodes=nodes) if self.is_fixed else ()
        return missing(need, nodes, ranks=ranks)

    def take(self, need: Need, nodes: Sequence[Node]) -> Placement | None:
        """Reserve resources if all ranks fit now, else return None."""
        if self.is_fixed:
            ranks: tuple[Node, ...] | None = chosen(self._config.placement, need=need, nodes=nodes)
            if ranks is not None and not has_room(need, ranks):
                return None
        else:
            ranks = plan(need, nodes)
        if ranks is None:
            return None
        bundles = _bundles(need, ranks)
        counts = [bundles.count(index) for index in range(max(bundles) + 1)]
        on = [ranks[bundles.index(index)].node_id for index in range(len(counts))]
        group = placement_group(
            [need.bundle(count) for count in counts],
            strategy="PACK",
            bundle_label_selector=[{_NODE_ID: node_id} for node_id in on],
        )
        is_pinned = False
        try:
            is_pinned = group.wait(timeout_seconds=_PIN_S)
        finally:
            if not is_pinned:
                _remove(group)
        if not is_pinned:
            return None
        return Placement(
            config=self._config,
            device=self._device,
            group=group,
            bundles=bundles,
            nodes=tuple(node.node_id for node in ranks),
            addresses={node.node_id: node.address for node in ranks},
            need=need,
            warnings=(*self._warnings, *split_groups(need.split, ranks)),
        )


def _bundles(need: Need, ranks: Sequence[Node]) -> tuple[int, ...]:
    """Bundle index per rank: the ranks of a tp group on one node share a bundle."""
    parts = [(rank // need.split.tp, node.node_id) for rank, node in enumerate(ranks)]
    numbers = dict(zip(dict.fromkeys(parts), itertools.count()))
    return tuple(numbers[part] for part in parts)


def _demand(need: Need, excluding: Iterable[str]) -> PlacementGroup:
    """Request the resources without choosing nodes, as demand for the autoscaler."""
    out = f"!in({','.join(sorted(excluding))})"
    selector = [{_NODE_ID: out}] * need.num_groups if excluding else None
    bundles = [need.bundle(need.split.tp)] * need.num_groups
    group: PlacementGroup = placement_group(bundles, strategy="PACK", bundle_label_selector=selector)
    return group


def _await_freed(placement: Placement, *, before: Mapping[str, Node]) -> None:
    """Wait until Ray counts removed resources as free, so that the next plan can use them."""
    deadline = time.monotonic() + _FREED_S
    held = {node: placement.need.bundle(placement.nodes.count(node)) for node in placement.addresses}
    while time.monotonic() < deadline:
        now = {node.node_id: node for node in cluster_nodes()}
        is_free = [
            now[node].free_cpus - before[node].free_cpus > bundle.get("CPU", 0) - 1e-3
            and now[node].free_gpus - before[node].free_gpus > bundle.get("GPU", 0) - 1e-3
            for node, bundle in held.items()
            if node in now and node in before
        ]
        if all(is_free):
            return
        time.sleep(0.05)
