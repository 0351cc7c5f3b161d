"""Placement of ranks on nodes.

tp   always within a node, unless a map of the user says otherwise
cp   on one node if it fits
pp   across nodes
     then: as few nodes as possible; of the same NVLink domain, zone and type of GPU, by Ray's labels

    10.0.0.1  [ 0 1 2 3 | 4 5 6 7 ]     tp=4 cp=2 pp=2 on nodes of 8 GPUs: a tp group per bar, a stage per node
    10.0.0.2  [ 8 9 .. ..         ]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raycache.errors import ConfigError
from raycache.parallel.rank_map import brief_ranks, parse_rank_map
from raycache.parallel.sharding import Split

_MAX_RANKS_PER_CPU = 16
"""Limit of CPU ranks per core; more would only wait for each other."""
_DOMAIN = "ray.io/gpu-domain"
_LIKENESS = (("ray.io/availability-zone", "ray.io/accelerator-type"), ("ray.io/accelerator-type",), ())
"""Labels that nodes of one gang should share, the best first."""
_SHOWN = 8
"""Nodes listed in a message."""
_GRAIN = 1e-4
"""Granularity of Ray's resources."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        node_id: Ray's, in hex.
        address: by which Ray reaches it.
        cpus, gpus: total resources in Ray.
        free_cpus, free_gpus: resources that are not reserved.
        labels: set by Ray or the user.
        is_draining: whether it is about to leave the cluster.
    """

    node_id: str
    address: str
    hostname: str
    cpus: float
    free_cpus: float
    gpus: float = 0
    free_gpus: float = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    is_draining: bool = False


@dataclass(frozen=True)
class Need:
    """What a gang needs.

    Attributes:
        split: of the model.
        num_cpus: reserved per rank; on CPU a fraction of one.
        num_gpus: per rank, 1 or 0.
        ranks_per_cpu: without GPUs, limit of ranks per CPU of a node until all nodes have reached it.
    """

    split: Split
    num_cpus: float
    num_gpus: int
    ranks_per_cpu: float = _MAX_RANKS_PER_CPU

    @property
    def num_groups(self) -> int:
        """Number of tp groups."""
        return self.split.pp * self.split.cp

    def bundle(self, num_ranks: int) -> dict[str, float]:
        """Resources of `num_ranks` ranks."""
        wanted = {"CPU": round(self.num_cpus * num_ranks, 4), "GPU": float(self.num_gpus * num_ranks)}
        return {name: amount for name, amount in wanted.items() if amount}

    def __str__(self) -> str:
        unit = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle(self.split.tp).items())
        return f"{self.num_groups} x {self.split.tp} ranks ({unit})"


def need_of(split: Split, *, replicas: int, device: str, nodes: Sequence[Node]) -> Need:
    """Compute what a gang needs.

    Args:
        replicas: number of gangs that share the cluster.
        device: "cpu" or "cuda".
        nodes: of the cluster.
    """
    if device == "cuda":
        cpus = [node.cpus for node in nodes if node.gpus] or [0.0]
        return Need(split, num_cpus=_whole_grains(min(1.0, min(cpus) / 8)), num_gpus=1)
    total = sum(node.cpus for node in nodes)
    # Ranks wait for each other most of the time, so several may share a core. Half of the cores are left to others, and
    # one more gang fits, since a new one starts before an old one ends.
    share = min(1.0, total / (2 * split.world_size * (replicas + 1)))
    density = max(1.0, split.world_size * replicas / max(total, 1.0))
    need = Need(split, num_cpus=max(_whole_grains(share), _GRAIN), num_gpus=0, ranks_per_cpu=density)
    largest = max((node.cpus for node in nodes), default=0.0)
    if need.num_cpus * split.tp > largest > 0:
        need = Need(split, max(_whole_grains(largest / split.tp), _GRAIN), 0, density)
    return need


def refuse_impossible(need: Need, nodes: Sequence[Node]) -> None:
    """Check that the gang would fit on these nodes if nothing else was running.

    Raises:
        ConfigError: it does not; the message says what there is.
    """
    split = f"tp={need.split.tp} pp={need.split.pp} cp={need.split.cp} ({need.split.world_size} ranks)"
    cpus, gpus = sum(node.cpus for node in nodes), int(sum(node.gpus for node in nodes))
    if need.num_gpus:
        if gpus < need.split.world_size:
            raise ConfigError(
                f"{split} needs {need.split.world_size} GPUs, the cluster has {gpus}; "
                f"use {'a smaller split' if gpus else '--device cpu'}"
            )
        largest = int(max(node.gpus for node in nodes))
        if largest < need.split.tp:
            raise ConfigError(
                f"tp={need.split.tp} does not fit into a node, the largest has {largest} GPUs; use a smaller tp, or "
                "say with placement=RANKS@NODE;... which ranks go where"
            )
    elif need.split.world_size > cpus * _MAX_RANKS_PER_CPU:
        raise ConfigError(
            f"{split} is too much for {cpus:.0f} CPUs, at most {_MAX_RANKS_PER_CPU} ranks share one; "
            "use a smaller split"
        )
    rooms = [_room(need, node, cpus=node.cpus, gpus=node.gpus) for node in nodes]
    if sum(rooms) < need.num_groups:
        raise ConfigError(
            f"{split} needs {need}, and the nodes have room for {sum(rooms)} of these groups, none of which may be "
            f"on two nodes: {_listed(nodes)}; use a smaller tp, or say with placement=RANKS@NODE;... which ranks go "
            "where"
        )


def plan(need: Need, nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Choose a node for each rank by free resources, deterministically.

    Returns:
        A node per world rank, or None if there are not enough resources now.
    """
    density = need.ranks_per_cpu
    usable = [node for node in nodes if not node.is_draining]
    while True:
        rooms = {node.node_id: _room_at(need, node, density=density) for node in usable}
        for level in _alike(usable):
            found = [layout for alike in level if (layout := _layout(alike, rooms=rooms, need=need)) is not None]
            if found:
                _, counts = min(found, key=lambda one: (not one[0], len(one[1])))
                groups = [node for node, count in counts for _ in range(count)]
                return tuple(groups[rank // need.split.tp] for rank in range(need.split.world_size))
        if need.num_gpus or density >= _MAX_RANKS_PER_CPU:
            return None
        density *= 2


def without(nodes: Sequence[Node], need: Need, ranks: Sequence[Node]) -> list[Node]:
    """The nodes after a gang has reserved its resources; `ranks` has a node per world rank."""
    counts = Counter(node.node_id for node in ranks)
    return [
        replace(
            node,
            free_cpus=node.free_cpus - need.num_cpus * counts[node.node_id],
            free_gpus=node.free_gpus - need.num_gpus * counts[node.node_id],
        )
        for node in nodes
    ]


def chosen(text: str, *, need: Need, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Nodes given by the user's map.

    Args:
        text: see `parse_rank_map`; nodes by address, host name or id.
    Returns:
        A node per world rank.
    Raises:
        ConfigError: a node does not exist, is ambiguous, or is too small.
    """
    found = tuple(_named(name, nodes) for name in parse_rank_map(text, world_size=need.split.world_size))
    for node, count in Counter(node.node_id for node in found).items():
        there = next(one for one in nodes if one.node_id == node)
        wanted = need.bundle(count)
        if wanted.get("GPU", 0) > there.gpus or wanted.get("CPU", 0) > there.cpus + _GRAIN:
            raise ConfigError(
                f"placement puts {count} ranks on {there.address}, they need {_resources(wanted)}, and it has "
                f"{_resources({'CPU': there.cpus, 'GPU': there.gpus})}"
            )
    return found


def has_room(need: Need, ranks: Sequence[Node]) -> bool:
    """Whether the nodes of a user's map have enough free resources; `ranks` has a node per world rank."""
    return not any(_short(need, ranks))


def split_groups(split: Split, ranks: Sequence[Node]) -> list[str]:
    """A warning per tp group that spans several nodes; `ranks` has a node per world rank."""
    lines = []
    for first in range(0, split.world_size, split.tp):
        on = {node.node_id: node.address for node in ranks[first : first + split.tp]}
        if len(on) > 1:
            those = brief_ranks(list(range(first, first + split.tp)))
            lines.append(
                f"the tp group of ranks {those} is on {len(on)} nodes ({', '.join(on.values())}), as placement "
                "asked: every layer waits for the network"
            )
    return lines


def missing(need: Need, nodes: Sequence[Node], *, ranks: Sequence[Node] = ()) -> str:
    """Message about the resources that a gang waits for, and what each node has.

    Args:
        ranks: a node per world rank if the user chose them; empty otherwise.
    """
    if ranks:
        return "; ".join(_short(need, ranks))
    usable = [node for node in nodes if not node.is_draining]
    room = sum(_room_at(need, node, density=_MAX_RANKS_PER_CPU) for node in usable)
    return f"needs {need}, there is room for {room}: {_listed(nodes)}"


def describe(ranks: Sequence[Node]) -> list[tuple[Node, str]]:
    """Each node with its ranks, in the order of their lowest one; `ranks` has a node per world rank."""
    of: dict[str, list[int]] = {}
    for rank, node in enumerate(ranks):
        of.setdefault(node.node_id, []).append(rank)
    nodes = {node.node_id: node for node in ranks}
    return [(nodes[node_id], brief_ranks(those)) for node_id, those in of.items()]


def _whole_grains(amount: float) -> float:
    """Round down to Ray's granularity, so that the ranks of a group fit into its reservation."""
    return round(int(amount / _GRAIN + 1e-6) * _GRAIN, 4)


def _room(need: Need, node: Node, *, cpus: float, gpus: float) -> int:
    """Number of tp groups that fit into these resources of a node."""
    per_group = need.bundle(need.split.tp)
    there = {"CPU": cpus, "GPU": gpus}
    return int(min(((there[name] + _GRAIN / 2) // amount for name, amount in per_group.items()), default=0))


def _room_at(need: Need, node: Node, *, density: float) -> int:
    room = _room(need, node, cpus=node.free_cpus, gpus=node.free_gpus)
    return room if need.num_gpus else min(room, int(node.cpus * density + 1e-6) // need.split.tp)


def _alike(nodes: Sequence[Node]) -> Iterator[list[list[Node]]]:
    """Sets of nodes that share labels, the closest sets first; finally all nodes as one set."""
    domains = sorted({node.labels[_DOMAIN] for node in nodes if _DOMAIN in node.labels})
    yield [[node for node in nodes if node.labels.get(_DOMAIN) == domain] for domain in domains]
    for names in _LIKENESS:
        sets: dict[tuple[str, ...], list[Node]] = {}
        for node in nodes:
            sets.setdefault(tuple(node.labels.get(name, "") for name in names), []).append(node)
        yield [sets[mark] for mark in sorted(sets)]


def _layout(
    nodes: Sequence[Node], *, rooms: Mapping[str, int], need: Need
) -> tuple[bool, list[tuple[Node, int]]] | None:
    """Place tp groups on as few nodes as possible, with whole stages on a node if possible.

    Returns:
        Whether all stages are whole, and the number of tp groups per node; None if they do not fit.
    """
    for size in (need.split.cp, 1):
        units = {node.node_id: rooms[node.node_id] // size for node in nodes}
        wanted = need.num_groups // size
        if sum(units.values()) < wanted:
            continue
        left = sorted(nodes, key=lambda node: (-units[node.node_id], -node.free_cpus, node.address, node.node_id))
        taken: list[tuple[Node, int]] = []
        while wanted:
            # The last node is the smallest that holds the rest, so that larger ones stay free for others.
            enough = [node for node in left if units[node.node_id] >= wanted]
            least = min((units[node.node_id] for node in enough), default=0)
            node = next((node for node in enough if units[node.node_id] == least), left[0])
            left.remove(node)
            count = min(units[node.node_id], wanted)
            taken.append((node, count * size))
            wanted -= count
        return size == need.split.cp, sorted(taken, key=lambda one: (-one[1], one[0].address, one[0].node_id))
    return None


def _named(name: str, nodes: Sequence[Node]) -> Node:
    found = [node for node in nodes if name in (node.address, node.hostname, node.node_id)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{node.address} ({node.hostname}, {node.node_id})" for node in found or nodes)
    if found:
        raise ConfigError(f"placement: {len(found)} nodes are called {name!r}; use the id of one: {there}")
    raise ConfigError(f"placement: there is no node {name!r} in the cluster; there are {there}")


def _short(need: Need, ranks: Sequence[Node]) -> Iterator[str]:
    """What the nodes of a user's map lack now."""
    for node, count in Counter(node.node_id for node in ranks).items():
        there = next(one for one in ranks if one.node_id == node)
        wanted = need.bundle(count)
        if wanted.get("GPU", 0) > there.free_gpus or wanted.get("CPU", 0) > there.free_cpus + _GRAIN / 2:
            free = {"CPU": there.free_cpus, "GPU": there.free_gpus}
            yield f"{there.address} needs {_resources(wanted)} for {count} ranks, free are {_resources(free)}"


def _listed(nodes: Sequence[Node]) -> str:
    shown = [
        f"{node.address} has {node.gpus:g} GPU ({node.free_gpus:g} free), {node.cpus:g} CPU ({node.free_cpus:g} free)"
        + (", is draining" if node.is_draining else "")
        for node in sorted(nodes, key=lambda node: (-node.free_gpus, -node.free_cpus, node.address, node.node_id))
    ]
    more = [f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return "; ".join([*shown[:_SHOWN], *more]) or "there is no node"


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
