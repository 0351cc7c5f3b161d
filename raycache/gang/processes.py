"""A gang of plain processes on this machine, without Ray: for scripts and tests.

The decider is the process that makes the gang. Ranks are forked from a server that has imported torch once, so that
a rank is up in
a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

from raycache.config import Config
from raycache.deployment.memory_plan import usable_cpus
from raycache.errors import RankLostError, RayCacheError
from raycache.gang.executors import GangExecutor
from raycache.parallel.board import AckBoard
from raycache.parallel.collectives import Group
from raycache.parallel.context import DECIDER, GroupHandle, Store, build_group, group_handles
from raycache.parallel.devices import require_gpus
from raycache.parallel.relay import BoardReceiver, leaders, receive_boards
from raycache.rank.runner import RankRunner, Seat

_HOST = "127.0.0.1"
_IDLE_S = 14 * 24 * 3600.0
"""How long a rank waits for a plan. Nobody beats while a script does other things, and none has to: on one machine a
decider that ends closes its connections."""


@dataclass(frozen=True)
class Invitation:
    """What a rank process needs to become a member of a gang."""

    config: Config
    seat: Seat
    handles: dict[str, GroupHandle]
    epoch: int
    board: Path


def invite(
    config: Config, *, device_type: str, store: Store, boards: Sequence[AckBoard], epoch: int, nodes: Sequence[int] = ()
) -> list[Invitation]:
    """One invitation per rank of a gang on this machine.

    Args:
        config: of the service.
        device_type: "cpu" or "cuda".
        store: where ranks and decider meet.
        boards: one per node.
        epoch: of the gang.
        nodes: node of each rank, for tests that have several on this machine; node 0 is the decider's.
    Raises:
        ConfigError: fewer GPUs than ranks, or no CUDA that works.
    """
    split = config.split
    if device_type == "cuda":
        require_gpus(split.world_size)
    places = tuple(nodes) or (0,) * split.world_size
    handles = group_handles(
        split,
        backend="nccl" if device_type == "cuda" else "gloo",
        store=store.address,
        epoch=epoch,
        timeout_s=config.rank_timeout_s,
        leaders=leaders(places, here=0),
    )
    handles["control"] = replace(handles["control"], timeout_s=_IDLE_S)
    threads = max(1, usable_cpus() // split.world_size)
    return [
        Invitation(
            config=config,
            seat=Seat(
                rank=rank,
                host=_HOST,
                device=f"cuda:{rank}" if device_type == "cuda" else "cpu",
                ranks_on_node=split.world_size,
                num_threads=threads,
            ),
            handles=handles,
            epoch=epoch,
            board=boards[places[rank]].path,
        )
        for rank in range(split.world_size)
    ]


class ProcessGang:
    """Ranks in processes of their own, joined, loaded and running.

    Args:
        config: of the service.
        device_type: "cpu" or "cuda".
        arenas: file of the host tier of each node; empty without one.
        nodes: node of each rank, for tests: as if ranks were on several. Node 0 is the decider's.
    Raises:
        RayCacheError: what kept a rank from starting; no process is left behind.

    Attributes:
        executor: to hand to an engine.
        num_pages: that all ranks hold.
    """

    def __init__(
        self, config: Config, *, device_type: str, arenas: Sequence[Path] = (), nodes: Sequence[int] = ()
    ) -> None:
        split = config.split
        nodes = tuple(nodes) or (0,) * split.world_size
        store = Store(_HOST)
        boards = [AckBoard.create(split.world_size) for _ in range(max(nodes) + 1)]
        self._store = store
        self._processes: list[RankProcess] = []
        self._receivers: list[BoardReceiver] = []
        try:
            invitations = invite(config, device_type=device_type, store=store, boards=boards, epoch=1, nodes=nodes)
            for invitation in invitations:
                self._processes.append(RankProcess(_run_rank, invitation))
            handles = dict(invitations[0].handles)
            handles["control"] = replace(handles["control"], timeout_s=config.rank_timeout_s)
            with ThreadPoolExecutor(1) as pool:
                # Joining is a meeting: the decider has to be on its way while it waits for the ranks' answers.
                joining = pool.submit(self._meet, boards[0], handles, nodes=nodes)
                try:
                    self.num_pages = min(self._receive(config.start_timeout_s))
                except BaseException:
                    # Or the decider would wait for members that do not come.
                    store.close()
                    raise
                control = joining.result()
            for process, node in zip(self._processes, nodes, strict=True):
                process.send((self.num_pages, arenas[node] if arenas else None))
            self._receive(config.start_timeout_s)
        except BaseException:
            self.kill()
            raise
        finally:
            for board in boards:
                board.unlink()
        plans_ahead = config.plans_ahead(device_type=device_type)
        self.executor = GangExecutor(
            control, split=split, board=boards[0], plans_ahead=plans_ahead, receivers=self._receivers
        )

    def _meet(self, board: AckBoard, handles: Mapping[str, GroupHandle], *, nodes: Sequence[int]) -> Group:
        """Join the decider's groups, in the ranks' order: boards first."""
        self._receivers = receive_boards(board, handles, nodes=nodes, epoch=1, host=_HOST)
        return build_group(handles["control"], member=DECIDER, epoch=1, host=_HOST, device=torch.device("cpu"))

    def join(self, timeout_s: float) -> None:
        """Wait for the ranks to end after their last plan; what has not ended by then is killed."""
        for process in self._processes:
            process.process.join(timeout_s)
        self.kill()

    def _receive(self, timeout_s: float) -> list[Any]:
        """The next value of every rank, by rank; the first one that fails is told at once."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        while missing := {p.connection: rank for rank, p in enumerate(self._processes) if rank not in found}:
            ready = wait(missing, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise RankLostError(
                    min(missing.values()), "", 0, f"no answer after {timeout_s:.0f} s; see --start-timeout-s"
                )
            for connection in ready:
                rank = missing[cast(Connection, connection)]
                found[rank] = self._processes[rank].receive()
        return [found[rank] for rank in sorted(found)]

    def kill(self) -> None:
        """End all ranks at once."""
        for receiver in self._receivers:
            receiver.close()
        for process in self._processes:
            process.process.kill()
            process.process.join()


class RankProcess:
    """A forked process that talks over a pipe.

    Args:
        target: called with (connection, invitation) in the process.
        invitation: for the rank.
    """

    def __init__(self, target: Callable[[Connection, Invitation], None], invitation: Invitation) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["raycache.gang.processes"])
        self._rank = invitation.seat.rank
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, invitation), daemon=True, name=f"rank {self._rank}")
        self.process.start()
        theirs.close()

    def send(self, value: Any) -> None:
        """Send a value to the rank."""
        self.connection.send(value)

    def receive(self) -> Any:
        """The rank's next value.

        Raises:
            RayCacheError: what the rank raised.
            RankLostError: it ended without a word.
        """
        try:
            value = self.connection.recv()
        except (EOFError, ConnectionError) as cause:
            self.process.join()
            raise RankLostError(self._rank, "", 0, f"process ended with code {self.process.exitcode}") from cause
        if isinstance(value, BaseException):
            raise value
        return value


def _run_rank(connection: Connection, invitation: Invitation) -> None:
    try:
        runner = RankRunner(invitation.config, invitation.seat)
        runner.join(invitation.handles, epoch=invitation.epoch, board=invitation.board)
        connection.send(runner.load())
        runner.build(*connection.recv())
        connection.send("running")
    except RayCacheError as cause:
        connection.send(cause)
        return
    runner.run()
