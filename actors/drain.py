"""Finds departing nodes: lost ones, and those that Ray drains, for example before a spot machine is reclaimed.

    ray drain-node, the autoscaler, KubeRay -> GCS: node, deadline -> here, about once a second -> the front end moves

Cloud notices are not read here: the node provider (autoscaler, KubeRay) gets them and drains the node. Ray has no
public API for draining nodes; `ray._private.state` is what its own libraries use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import ray
from ray._private.state import state
from ray.exceptions import RayError

from actors.placement import Placement, cluster_nodes
from raycache.parallel.placement import plan


@dataclass(frozen=True)
class DepartingNodes:
    """Nodes of a gang that it cannot stay on.

    Attributes:
        lost: ids of dead nodes.
        draining: ids of nodes that are alive but draining.
        left_s: seconds until the earliest deadline of a draining node, by this machine's clock; infinite if none is
            set.
    """

    lost: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    left_s: float = math.inf

    def __bool__(self) -> bool:
        return bool(self.lost or self.draining)


def departing_nodes(nodes: Iterable[str]) -> DepartingNodes:
    """Find which of `nodes` are departing; blocks while the GCS is away.

    Raises:
        OSError: the GCS is away.
    """
    wanted = set(nodes)
    try:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        deadlines_ms = {node: at for node, at in state.get_draining_nodes().items() if node in wanted & alive}
    except (RayError, RuntimeError) as cause:
        raise OSError(f"the cluster's head does not say which nodes it has: {cause}") from cause
    ends = [at / 1000 for at in deadlines_ms.values() if at]
    left_s = min(ends) - time.time() if ends else math.inf
    return DepartingNodes(frozenset(wanted - alive), frozenset(deadlines_ms), left_s)


def can_move(placement: Placement) -> bool:
    """Whether the ranks would fit on other nodes now, if they released their current resources.

    Raises:
        OSError: the GCS is away.
    """
    try:
        nodes = [node for node in cluster_nodes() if not node.is_draining]
    except (RayError, RuntimeError) as cause:
        raise OSError(f"the cluster's head does not say what is free: {cause}") from cause
    freed = []
    for node in nodes:
        held = placement.need.bundle(placement.nodes.count(node.node_id)) if node.node_id in placement.nodes else {}
        cpus, gpus = node.free_cpus + held.get("CPU", 0.0), node.free_gpus + held.get("GPU", 0.0)
        freed.append(replace(node, free_cpus=cpus, free_gpus=gpus))
    return plan(placement.need, freed) is not None
