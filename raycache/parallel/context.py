"""Coordinates and process groups of a rank (relay.py has groups of its own).

Groups are built from `GroupHandle`s, which are plain data, since a ProcessGroup cannot be serialised. A handle has the
members of the group, the rendezvous store, and the epoch of the gang, so that ranks of a rebuilt gang never join old
ones. The default group of torch.distributed is not used: two ranks can live in one process.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # its stubs do not export the stores
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from raycache.errors import ConfigError, RankLostError
from raycache.parallel.collectives import Group, TorchGroup
from raycache.parallel.devices import Peer, gpu_id, introduce
from raycache.parallel.nccl import nccl_of
from raycache.parallel.node_group import join_on_node
from raycache.parallel.peer_group import with_peers
from raycache.parallel.sharding import Coords, Split
from raycache.parallel.uploads import uploaded

DECIDER = -1
"""Member id of the decider in the control group; ranks have their world rank."""

_CONTROL_THREADS = 32
"""Broadcasts that the decider may have open. One is open until the last stage takes it, after all its work before, and
the first stages need those that follow: up to three per plan in flight, of which there is one per stage."""

_DIRECT_BYTES = 1 << 20
"""Bytes of all members' tensors together, up to which each goes to all members at once. gloo's rings have 2 (n - 1)
rounds for a sum and n - 1 for a gather, each of which waits until the next process gets a core. On two cores that have
more to do, for tensors of one member, ring and direct, in ms:

    256 bytes    4 ranks: sum 6.2 and 1.3, gather 3.1 and 1.5    8 ranks: sum 21 and 5,  gather 15 and 5
    256 KiB               sum 7.0 and 2.9, gather 5.1 and 2.7             sum 23 and 10, gather 16 and 10
"""


@dataclass(frozen=True)
class GroupHandle:
    """What is needed to build one process group, serialisable.

    Attributes:
        name: such as "tp.0"; unique within an epoch.
        kind: "tp", "pp", "cp", "tp_cp", "control" or "boards".
        members: world ranks in group order; `DECIDER` is first in its groups.
        backend: "gloo" or "nccl"; "unix" for the control group of a gang on one node.
        store_host, store_port: of the gang's TCPStore.
        epoch: of the gang; handles of another epoch are rejected.
        timeout_s: timeout of each collective.
    """

    name: str
    kind: str
    members: tuple[int, ...]
    backend: str
    store_host: str
    store_port: int
    epoch: int
    timeout_s: float

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain values."""
        return {**self.__dict__, "members": list(self.members)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> GroupHandle:
        """Inverse of `to_wire`."""
        return cls(**{**wire, "members": tuple(wire["members"])})


def group_handles(
    split: Split,
    *,
    backend: str,
    store: tuple[str, int],
    epoch: int,
    timeout_s: float,
    leaders: Sequence[int] = (),
    is_on_one_node: bool = False,
) -> dict[str, GroupHandle]:
    """All groups of a gang, by name: control, one per row of each axis, and one per leader of a node.

    A leader relays the board of its node to the decider; the decider's node has none.

    Args:
        is_on_one_node: whether all ranks run on the decider's node.
    """
    world = tuple(range(split.world_size))

    def handle(name: str, kind: str, members: tuple[int, ...], group_backend: str) -> GroupHandle:
        return GroupHandle(name, kind, members, group_backend, store[0], store[1], epoch, timeout_s)

    handles = [handle("control", "control", (DECIDER, *world), "unix" if is_on_one_node else "gloo")]
    for axis in ("tp", "pp", "cp"):
        rows = sorted({split.axis_members(axis, rank) for rank in world})
        handles += [handle(f"{axis}.{row[0]}", axis, row, backend) for row in rows]
    if split.tp > 1 and split.cp > 1:
        stages = sorted({split.stage_members(rank) for rank in world})
        handles += [handle(f"tp_cp.{row[0]}", "tp_cp", row, backend) for row in stages]
    handles += [handle(f"boards.{rank}", "boards", (DECIDER, rank), "gloo") for rank in leaders]
    return {h.name: h for h in handles}


class Store:
    """The rendezvous store of a gang, hosted by this process; `host` is an address that every rank can reach."""

    def __init__(self, host: str) -> None:
        # A TCPStore that opens its own socket listens on all interfaces.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as server:
            port = server.getsockname()[1]
            self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        self.address = (host, port)

    def close(self) -> None:
        """Close the store; ranks that are still waiting fail immediately."""
        del self._store


def come_to(handle: GroupHandle, *, member: int) -> TCPStore:
    """Connect to the gang's rendezvous store, once for all groups of this process.

    Connections are slow: torch makes a reverse DNS lookup for each, and with many at once some take seconds.

    Args:
        handle: of any group.
        member: this rank's world rank, or `DECIDER`.
    Raises:
        RankLostError: the store cannot be reached.
    """
    timeout = timedelta(seconds=handle.timeout_s)
    try:
        return TCPStore(handle.store_host, handle.store_port, is_master=False, timeout=timeout)
    except RuntimeError as cause:
        where = f"{handle.store_host}:{handle.store_port}"
        raise RankLostError(
            member, handle.name, -1, f"the gang's meeting point {where} is not to be reached"
        ) from cause


def build_group(
    handle: GroupHandle,
    *,
    member: int,
    epoch: int,
    host: str,
    device: torch.device,
    meeting: TCPStore | None = None,
    has_peer_memory: bool = False,
) -> Group:
    """Join a group; returns when all members have joined.

    Args:
        member: this rank's world rank, or `DECIDER`.
        epoch: of this process.
        host: address of this process that the other members can reach (gloo only).
        device: of the tensors (nccl only).
        meeting: an existing connection to the rendezvous store.
        has_peer_memory: whether members on the same node exchange tensors without NCCL if that is faster (nccl only).
    Raises:
        RankLostError: the handle belongs to another epoch, or other members did not join in time.
        ConfigError: two members use the same GPU (nccl only).
    """
    _check_epoch(handle, member=member, epoch=epoch)
    if member not in handle.members:
        raise ConfigError(f"rank {member} is not a member of group {handle.name}: {handle.members}")
    if len(handle.members) == 1:
        return Group()
    timeout = timedelta(seconds=handle.timeout_s)
    index, size = handle.members.index(member), len(handle.members)
    tcp = meeting if meeting is not None else come_to(handle, member=member)
    store = PrefixStore(f"{handle.epoch}/{handle.name}", tcp)
    try:
        if handle.backend == "unix":
            return join_on_node(store, index, size, timeout_s=handle.timeout_s)
        if handle.backend == "gloo":
            num_threads = _CONTROL_THREADS if (handle.kind, member) == ("control", DECIDER) else None
            gloo = _gloo(store, index, size, timeout, host, num_threads)
            return TorchGroup(gloo, rank=index, size=size, direct_bytes=_DIRECT_BYTES)
        peers = introduce(Peer(member, host, gpu_id(device)), handle.members, store=store, group=handle.name)
        made = _nccl(store, index, size, timeout, device)
    except (RuntimeError, TimeoutError) as cause:
        raise RankLostError(member, handle.name, -1, f"group did not form within {handle.timeout_s:.0f} s") from cause
    except OSError as cause:
        raise RankLostError(member, handle.name, -1, f"group did not form: {cause}") from cause
    connect(made, device, handle=handle, me=member, peers=peers)
    group = TorchGroup(made, rank=index, size=size, transport="NCCL", nccl=nccl_of(made))
    if not has_peer_memory or any(peer.host != host for peer in peers):
        return group
    name = f"{epoch}.{handle.name}.{member}"
    try:
        return with_peers(group, made, name=name, store=store, device=device, limit_s=handle.timeout_s)
    except RuntimeError as cause:  # such as a kernel that waited for a member in vain
        raise RankLostError(member, handle.name, -1, f"peer memory could not be tried: {cause}") from cause


def _check_epoch(handle: GroupHandle, *, member: int, epoch: int) -> None:
    if handle.epoch != epoch:
        cause = f"handle of epoch {handle.epoch} refused, this gang is epoch {epoch}"
        raise RankLostError(member, handle.name, -1, cause)


def _gloo(
    store: PrefixStore, index: int, size: int, timeout: timedelta, host: str, num_threads: int | None
) -> ProcessGroupGloo:
    # Without a device gloo uses the address of the host name, which others may not be able to reach.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    if num_threads is not None:
        options._threads = num_threads
    return ProcessGroupGloo(store, index, size, options)


def _nccl(store: PrefixStore, index: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    # Imported here: a CPU build of torch has no such name.
    from torch.distributed import ProcessGroupNCCL

    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, index, size, options)


def connect(group: Any, device: torch.device, *, handle: GroupHandle, me: int, peers: Sequence[Peer]) -> None:
    """Make NCCL connect all members now by a first all-reduce, since its lazy connection has no timeout.

    Args:
        group: a ProcessGroupNCCL.
        me: this rank's world rank.
        peers: the other members, which have just introduced themselves.
    Raises:
        RankLostError: NCCL could not connect them, or not within the group's timeout.
    """
    outcome: Queue[str] = Queue()

    def add_up() -> None:
        try:
            torch.cuda.set_device(device)
            one = torch.ones(1, device=device)
            group.allreduce([one]).wait()
            outcome.put("" if one.item() == len(handle.members) else "their sum is wrong")
        except RuntimeError as cause:
            outcome.put(str(cause).strip().splitlines()[-1])

    # On a thread that can be abandoned, since NCCL cannot be interrupted while it waits for a peer.
    Thread(target=add_up, name=f"nccl {handle.name}", daemon=True).start()
    try:
        problem = outcome.get(timeout=handle.timeout_s)
    except Empty:
        problem = f"no answer within {handle.timeout_s:.0f} s"
    if problem:
        raise RankLostError(
            me,
            handle.name,
            -1,
            f"NCCL cannot connect it to {', '.join(map(str, peers))}: {problem}. All of them met over TCP, so NCCL "
            "uses another network: set NCCL_SOCKET_IFNAME to the interface with these addresses, and "
            "NCCL_IB_DISABLE=1 if InfiniBand does not work; NCCL_DEBUG=INFO shows what it tries",
        )


@dataclass(frozen=True)
class ParallelContext:
    """This rank's coordinates, groups and device. Always passed as a whole.

    Attributes:
        split: sizes of the axes.
        rank: world rank.
        device: of weights, cache and activations.
        tp, pp, cp: this rank's group of each axis.
        tp_cp: all ranks of this rank's stage, if it is split over both tp and cp.
        control: decider (index 0) and all ranks, gloo or Unix sockets.
    """

    split: Split
    rank: int
    device: torch.device
    tp: Group = field(default_factory=Group)
    pp: Group = field(default_factory=Group)
    cp: Group = field(default_factory=Group)
    tp_cp: Group = field(default_factory=Group)
    control: Group = field(default_factory=Group)

    def on_device(self, numbers: NDArray[Any]) -> Tensor:
        """Copy to this rank's device asynchronously."""
        return uploaded(torch.from_numpy(numbers), self.device)

    @property
    def coords(self) -> Coords:
        """Coordinates in the gang."""
        return self.split.coords(self.rank)

    @property
    def stage(self) -> Group:
        """All ranks of this rank's stage, tp varying fastest."""
        if self.tp.size == 1:
            return self.cp
        return self.tp if self.cp.size == 1 else self.tp_cp

    @property
    def transports(self) -> tuple[str, ...]:
        """How the ranks of this stage exchange small tensors: one, or more if its groups differ."""
        return tuple(sorted({group.transport for group in (self.tp, self.cp, self.tp_cp) if group.size > 1}))

    def layers(self, num_layers: int) -> range:
        """Layers of this rank's stage of a model with `num_layers`."""
        return self.split.stage_layers(num_layers, self.pp.rank)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.pp.rank == self.pp.size - 1

    @property
    def without_stages(self) -> ParallelContext:
        """This rank's context for a model that is not split into stages, held by the ranks of its stage."""
        split = replace(self.split, pp=1, stages=())
        return replace(self, split=split, rank=split.rank(replace(self.coords, pp=0)), pp=Group())

    @classmethod
    def single(cls, device: torch.device) -> ParallelContext:
        """The context of a gang of one rank."""
        return cls(split=Split(), rank=0, device=device)

    @classmethod
    def join(
        cls,
        split: Split,
        *,
        rank: int,
        host: str,
        device: torch.device,
        handles: Mapping[str, GroupHandle],
        epoch: int,
        has_peer_memory: bool = False,
    ) -> ParallelContext:
        """Join all groups of this rank, in the order of `handles`, which must be the same on all ranks.

        Args:
            has_peer_memory: see `build_group`; not for neighbours of the pipeline, who exchange large tensors.
        Raises:
            RankLostError: a handle belongs to another epoch, or a member did not join in time.
        """
        mine = [handle for handle in handles.values() if rank in handle.members and handle.kind != "boards"]
        for handle in mine:
            _check_epoch(handle, member=rank, epoch=epoch)
        meeting = come_to(mine[0], member=rank)
        groups = {
            handle.kind: build_group(
                handle,
                member=rank,
                epoch=epoch,
                host=host,
                device=device,
                meeting=meeting,
                has_peer_memory=has_peer_memory and handle.kind != "pp",
            )
            for handle in mine
        }
        return cls(split=split, rank=rank, device=device, **groups)

    def close(self) -> None:
        """Leave all groups, so that members waiting for this rank fail immediately instead of timing out."""
        for group in (self.tp, self.pp, self.cp, self.tp_cp, self.control):
            group.close()
