"""A gang of plain processes on this machine, without Ray: for scripts and tests.

The decider is the process that makes the gang. Ranks are forked from a server that has imported torch once, so that
a rank is up in
a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

from raycache.config import Config
from raycache.engine.executors import GangExecutor
from raycache.engine.memory_plan import usable_cpus
from raycache.engine.runner import RankRunner, Seat
from raycache.errors import ConfigError, RankLostError, RayCacheError
from raycache.parallel.board import AckBoard
from raycache.parallel.context import DECIDER, GroupHandle, Store, build_group, group_handles
from raycache.parallel.sharding import Split

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


def invite(config: Config, *, device_type: str, store: Store, board: AckBoard, epoch: int) -> list[Invitation]:
    """One invitation per rank of a gang on this machine.

    Raises:
        ConfigError: fewer GPUs than ranks.
    """
    split = Split(tp=config.tp, pp=config.pp, cp=config.cp)
    if device_type == "cuda" and torch.cuda.device_count() < split.world_size:
        raise ConfigError(
            f"tp={config.tp} pp={config.pp} cp={config.cp} needs {split.world_size} GPUs, this machine has "
            f"{torch.cuda.device_count()}; use a smaller split or --device cpu"
        )
    handles = group_handles(
        split,
        backend="nccl" if device_type == "cuda" else "gloo",
        store=store.address,
        epoch=epoch,
        timeout_s=config.rank_timeout_s,
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
            board=board.path,
        )
        for rank in range(split.world_size)
    ]


class ProcessGang:
    """Ranks in processes of their own, joined, loaded and running.

    Args:
        config: of the service.
        device_type: "cpu" or "cuda".
        arena: file of the host tier, or None.
    Raises:
        RayCacheError: what kept a rank from starting; no process is left behind.

    Attributes:
        executor: to hand to an engine.
        num_pages: that all ranks hold.
    """

    def __init__(self, config: Config, *, device_type: str, arena: Path | None = None) -> None:
        split = Split(tp=config.tp, pp=config.pp, cp=config.cp)
        store = Store(_HOST)
        board = AckBoard.create(split.world_size)
        self._store = store
        self._processes: list[RankProcess] = []
        try:
            invitations = invite(config, device_type=device_type, store=store, board=board, epoch=1)
            for invitation in invitations:
                self._processes.append(RankProcess(_run_rank, invitation))
            handle = replace(invitations[0].handles["control"], timeout_s=config.rank_timeout_s)
            with ThreadPoolExecutor(1) as pool:
                # Joining is a meeting: the decider has to be on its way while it waits for the ranks' answers.
                joining = pool.submit(
                    build_group, handle, member=DECIDER, epoch=1, host=_HOST, device=torch.device("cpu")
                )
                try:
                    self.num_pages = min(self._receive(config.start_timeout_s))
                except BaseException:
                    # Or the decider would wait for members that do not come.
                    store.close()
                    raise
                control = joining.result()
            for process in self._processes:
                process.send((self.num_pages, arena))
            self._receive(config.start_timeout_s)
        except BaseException:
            self.kill()
            raise
        finally:
            board.unlink()
        self.executor = GangExecutor(control, split=split, board=board)

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
        context.set_forkserver_preload(["raycache.engine.processes"])
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
