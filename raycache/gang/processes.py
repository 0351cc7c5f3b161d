"""A gang of plain processes on this machine, without Ray: for scripts and tests.

The process that makes the gang is the decider. Ranks are forked from a server that has imported torch, to start in a
fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

from raycache.config import Config
from raycache.deployment.decode_split import with_transports
from raycache.deployment.deployment import Deployment, served_model
from raycache.deployment.memory_plan import usable_cpus
from raycache.deployment.weights import with_weights_form
from raycache.errors import ConfigError, RankLostError, RayCacheError
from raycache.gang.meeting import Meeting
from raycache.parallel.board import AckBoard
from raycache.parallel.devices import GpuModel, require_gpus
from raycache.rank.build import load
from raycache.rank.member import Invitation, RankSpec, join, threads_of
from raycache.rank.run import run

_HOST = "127.0.0.1"
_NO_GUARD = 78
"""Exit code of a rank whose main module starts ranks itself."""
_IDLE_S = 14 * 24 * 3600.0
"""How long a rank waits for a plan. Scripts send no heartbeats; on one machine none are needed, as a decider that ends
closes its connections."""


def end_if_imported_by_rank() -> None:
    """End this process if it is a new rank that is importing the script it belongs to: the script has no main guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(_NO_GUARD)  # without the traceback of another failed start; the parent says what to do


def meet_here(config: Config, *, device_type: str, nodes: Sequence[int] = ()) -> tuple[Meeting, list[Invitation]]:
    """Set up the rendezvous of a gang on this machine, with an invitation per rank.

    Args:
        device_type: "cpu" or "cuda".
        nodes: node of each rank, for tests: as if ranks were on several. Node 0 is the decider's.
    Raises:
        ConfigError: fewer GPUs than ranks, or CUDA does not work.
    """
    size = config.world_size
    if device_type == "cuda":
        require_gpus(size)
    nodes = tuple(nodes) or (0,) * size
    meeting = Meeting(config, device_type=device_type, epoch=1, host=_HOST, nodes=nodes, here=0, plan_timeout_s=_IDLE_S)
    boards = {0: meeting.board, **{nodes[rank]: AckBoard.create(size) for rank in meeting.leaders}}
    # Torch's default in the forked ranks follows the variable.
    is_set = config.cpu_threads == "auto" and bool(os.environ.get("OMP_NUM_THREADS"))
    specs = [
        RankSpec(
            rank=rank,
            host=_HOST,
            device=f"cuda:{rank}" if device_type == "cuda" else "cpu",
            ranks_on_node=size,
            num_threads=0 if is_set else threads_of(config, cpus=usable_cpus(), ranks_on_node=size),
        )
        for rank in range(size)
    ]
    return meeting, meeting.invitations(specs, {node: board.path for node, board in boards.items()})


class ProcessGang:
    """Ranks in separate processes, joined, loaded and running.

    Args:
        arenas: host tier file of each node; empty without a host tier.
        nodes: node of each rank, for tests: as if ranks were on several. Node 0 is the decider's.
    Raises:
        RayCacheError: a rank failed to start; all processes have been ended.

    Attributes:
        deployment: the ranks' deployment, including the form of their weights and whether they use peer memory.
        executor: pass it to an engine.
        num_pages: pages per rank.
    """

    def __init__(self, deployment: Deployment, *, arenas: Sequence[Path] = (), nodes: Sequence[int] = ()) -> None:
        config, executor = deployment.config, None
        timeout_s = config.start_timeout_s
        self._meeting, invitations = meet_here(config, device_type=deployment.device_type, nodes=nodes)
        try:
            self._ranks = ProcessRanks(_run_rank, invitations)
            try:
                gpus = [gpu for gpu in self._ranks.receive(timeout_s) if gpu is not None]
                self.deployment = with_weights_form(deployment, gpus)
                self._ranks.send([self.deployment.config.weights] * len(invitations))
                executor, transports = self._meeting.join(lambda: self._ranks.receive(timeout_s))
                self.deployment = with_transports(self.deployment, transports)
                self._ranks.send([self.deployment.config.peer_memory] * len(invitations))
                self.num_pages = min(self._ranks.receive(timeout_s))
                by_rank = [arenas[node] if arenas else None for node in tuple(nodes) or (0,) * len(invitations)]
                self._ranks.send([(self.num_pages, arena) for arena in by_rank])
                self._ranks.receive(timeout_s)
            except BaseException:  # an interrupt, too: the processes would stay
                if executor is not None:
                    executor.abandon()
                self._ranks.end()
                self._ranks.join(None)
                raise
        finally:
            for path in {invitation.board for invitation in invitations}:
                path.unlink(missing_ok=True)
        self.executor = executor
        executor.watch(self._ranks)

    def join(self, timeout_s: float) -> None:
        """Wait for the ranks to end after their last plan; kill those that have not ended in time."""
        self._ranks.join(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill all ranks."""
        self.executor.abandon()
        self._ranks.end()
        self._ranks.join(None)


class RankProcess:
    """A forked rank process, connected by a pipe.

    Args:
        target: called with (connection, invitation) in the new process.
    """

    def __init__(self, target: Callable[[Connection, Invitation], None], invitation: Invitation) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["raycache.gang.processes"])
        self._rank = invitation.spec.rank
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
            RayCacheError: raised in the rank.
            ConfigError: the process imports a script that starts ranks.
            RankLostError: the process ended without sending a value.
        """
        try:
            value = self.connection.recv()
        except (EOFError, ConnectionError) as cause:
            self.process.join()
            if self.process.exitcode == _NO_GUARD:
                raise ConfigError(
                    "every rank imports the main script, which would start ranks again; put the script's code under "
                    '`if __name__ == "__main__":`'
                ) from None
            raise RankLostError(self._rank, "", 0, f"process ended with code {self.process.exitcode}") from cause
        if isinstance(value, BaseException):
            raise value
        return value


class ProcessRanks:
    """The processes of a gang, by rank.

    Args:
        target: called with (connection, invitation) in each process.
        invitations: one per rank.
    """

    def __init__(self, target: Callable[[Connection, Invitation], None], invitations: Sequence[Invitation]) -> None:
        self._processes: list[RankProcess] = []
        try:
            for invitation in invitations:
                self._processes.append(RankProcess(target, invitation))
        except BaseException:  # an interrupt, too: those that have started would stay
            self.end()
            self.join(None)
            raise

    def send(self, values: Sequence[Any]) -> None:
        """Send each rank its value."""
        for process, value in zip(self._processes, values, strict=True):
            process.send(value)

    def receive(self, timeout_s: float) -> list[Any]:
        """The next value of every rank; raises as soon as one of them fails.

        Raises:
            RayCacheError: raised in a rank.
            RankLostError: a rank ended, or sent nothing in time.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        while missing := {p.connection: rank for rank, p in enumerate(self._processes) if rank not in found}:
            ready = wait(missing, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise RankLostError(
                    min(missing.values()),
                    "",
                    0,
                    f"no reply after {timeout_s:.0f} s; raise --start-timeout-s if it needs longer",
                )
            for connection in ready:
                rank = missing[cast(Connection, connection)]
                found[rank] = self._processes[rank].receive()
        return [found[rank] for rank in sorted(found)]

    def wait(self) -> Mapping[int, str]:
        """Wait until at least one has ended; rank -> cause."""
        sentinels = {p.process.sentinel: rank for rank, p in enumerate(self._processes)}
        return {sentinels[cast(int, sentinel)]: "its process ended" for sentinel in wait(sentinels)}

    def end(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.process.kill()

    def join(self, timeout_s: float | None) -> None:
        """Wait for each process to end, up to `timeout_s` seconds; None: without limit."""
        for process in self._processes:
            process.process.join(timeout_s)


def _run_rank(connection: Connection, invitation: Invitation) -> None:
    spec, config = invitation.spec, invitation.config
    try:
        connection.send(GpuModel.of(torch.device(spec.device)) if spec.device != "cpu" else None)
        config = replace(config, weights=connection.recv())
        member = join(invitation)
        connection.send(member.ctx.transports)
        config = replace(config, peer_memory=connection.recv())
        loaded = load(Deployment(config, served_model(config), member.ctx.device.type), member)
        connection.send(loaded.measure())
        rank = loaded.build(*connection.recv())
        connection.send("running")
    except RayCacheError as cause:
        connection.send(cause)
        return
    run(rank, member)
