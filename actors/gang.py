"""The ranks of one epoch: created, met, loaded, watched, ended. A gang is never repaired: a new one takes its place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError

from actors.answers import ActorLostError, ours
from actors.placement import Places
from actors.rank import RankActor
from raycache.config import Config
from raycache.deployment.memory_use import human_bytes
from raycache.errors import ConfigError, RankLostError
from raycache.gang.executors import GangExecutor
from raycache.host.directory import DirectoryGoneError
from raycache.parallel.board import AckBoard
from raycache.parallel.collectives import Group
from raycache.parallel.context import DECIDER, Store, build_group, group_handles
from raycache.parallel.interfaces import link, require_reachable
from raycache.parallel.relay import BoardReceiver, leaders, receive_boards
from raycache.rank.runner import Seat

LOADING = "loading weights"

_KILL_TIMEOUT_S = 60.0
"""For a rank that was killed to be dead; Ray takes some seconds for one that does not answer it."""


class Gang:
    """Rank actors of one epoch.

    Args:
        config: of the service.
        device: "cpu" or "cuda".
        places: for the ranks.
        epoch: number of this gang; handles of others are refused.
        replica: whose ranks they are.
        arenas: node id -> file of the host tier there, which only one gang at a time moves rows in; empty without one.
        are_ranks_gone: waits so many seconds for the ranks of gangs before to be dead on all nodes; whether they are.
        on_progress: told phase and share (0 to 1) while the gang starts; what it raises ends the start.
    Raises:
        RayCacheError: what kept a rank from starting; no actor is left behind.

    Attributes:
        executor: to hand to an engine.
        num_pages: that every rank holds.
        rows: one per rank, for people.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: str,
        places: Places,
        epoch: int,
        replica: str,
        arenas: Mapping[str, Path],
        are_ranks_gone: Callable[[float], bool],
        on_progress: Callable[[str, float], None],
    ) -> None:
        self._config, self._epoch, self._replica = config, epoch, replica
        self._split = config.split
        self._on_progress = on_progress
        self._running: list[Any] = []
        self._actors: list[Any] = []
        self._receivers: list[BoardReceiver] = []
        # Ranks of a lost gang end by themselves, but they may still be writing into an arena.
        if arenas and not are_ranks_gone(_KILL_TIMEOUT_S):
            raise ActorLostError(f"ranks of the gang before still use the host tier after {_KILL_TIMEOUT_S:.0f} s")
        self._board = AckBoard.create(config.world_size)
        # Without a name at once, so that nothing is left of it even if this process is killed while ranks start.
        board = self._board.share()
        try:
            for rank in range(config.world_size):
                self._actors.append(self._create(rank, places))
            wheres = self._get([actor.where.remote() for actor in self._actors], phase="starting ranks")
            seats = _seats(wheres, device=device)
            self._meet(seats, wheres, board=board, epoch=epoch)
            fits = self._get([actor.load.remote() for actor in self._actors], phase=LOADING)
            self.num_pages = min(fits)
            builds = [
                actor.build.remote(self.num_pages, arenas[where["node"]] if arenas else None)
                for actor, where in zip(self._actors, wheres, strict=True)
            ]
            self._get(builds, phase="making pools")
        except BaseException:
            self.kill()
            raise
        finally:
            self._board.unshare()
        self.rows = [
            {
                "rank": seat.rank,
                "coords": str(self._split.coords(seat.rank)),
                "node": seat.host,
                "device": _device(where, seat),
            }
            for seat, where in zip(seats, wheres, strict=True)
        ]
        self._running = [actor.run.remote() for actor in self._actors]

    def explain(self, error: RankLostError) -> RankLostError:
        """Ask Ray which rank really ended; the survivors only saw a silent peer.

        Args:
            error: as the executor saw it.
        """
        ended, _ = ray.wait(self._running, num_returns=len(self._running), timeout=1.0)
        for rank, run in enumerate(self._running):
            if run in ended:
                try:
                    ray.get(run)
                except RayActorError as cause:
                    text = str(cause).strip().splitlines()[0]
                    return RankLostError(rank, str(self._split.coords(rank)), error.step, f"its actor died: {text}")
                except RayTaskError as cause:
                    if not isinstance(cause.cause, RankLostError):
                        return RankLostError(rank, str(self._split.coords(rank)), error.step, repr(cause.cause))
        return error

    def join(self, timeout_s: float) -> None:
        """Wait for the ranks to end after their last plan, then remove them."""
        ray.wait(self._running, num_returns=len(self._running), timeout=timeout_s)
        self.kill()

    def kill(self) -> None:
        """Remove all ranks at once. They are gone when the next gang begins."""
        for receiver in self._receivers:
            receiver.close()
        for actor in self._actors:
            ray.kill(actor)

    def _create(self, rank: int, places: Places) -> Any:
        return (
            ray.remote(RankActor)
            .options(**places.options(rank))
            .remote(self._config, rank, epoch=self._epoch, replica=self._replica)
        )

    def _meet(self, seats: Sequence[Seat], wheres: Sequence[dict[str, Any]], *, board: Path, epoch: int) -> None:
        """Exchange handles; every rank and the decider build their groups from them."""
        mine = link(self._config.interface, node_address=ray.util.get_node_ip_address())
        require_reachable({"the engine": mine, **{f"rank {i}": where["link"] for i, where in enumerate(wheres)}})
        host = mine.host
        here = ray.get_runtime_context().get_node_id()
        self._store = Store(host)
        nodes = [where["node"] for where in wheres]
        leading = leaders(nodes, here=here)
        device = torch.device(seats[0].device).type
        handles = group_handles(
            self._split,
            backend="nccl" if device == "cuda" else "gloo",
            store=self._store.address,
            epoch=epoch,
            timeout_s=self._config.rank_timeout_s,
            leaders=leading,
        )
        others = self._get([self._actors[rank].new_board.remote() for rank in leading], phase="making boards")
        boards = {here: board, **{nodes[rank]: path for rank, path in zip(leading, others, strict=True)}}
        joins = [
            actor.join.remote(seat, handles, epoch, boards[node])
            for actor, seat, node in zip(self._actors, seats, nodes, strict=True)
        ]

        def meet() -> Group:
            """In the ranks' order: boards first."""
            self._receivers = receive_boards(self._board, handles, nodes=nodes, epoch=epoch, host=host)
            return build_group(handles["control"], member=DECIDER, epoch=epoch, host=host, device=torch.device("cpu"))

        with ThreadPoolExecutor(1) as pool:
            control = pool.submit(meet)
            try:
                self._get(joins, phase="joining groups")
            except BaseException:
                # Or the decider would wait for members that do not come.
                self._store.close()
                raise
            self.executor = GangExecutor(
                control.result(),
                split=self._split,
                board=self._board,
                plans_ahead=self._config.plans_ahead(device_type=device),
                receivers=self._receivers,
            )

    def _told(self, phase: str) -> tuple[str, float]:
        """Phase and share; of weights with bytes, once all ranks know how many they read."""
        loaded, to_load = self._board.loaded()
        if phase == LOADING and to_load and not self._config.dummy_weights:
            phase += f": {human_bytes(loaded)} of {human_bytes(to_load)}"
        return phase, loaded / max(to_load, 1)

    def _get(self, refs: list[Any], *, phase: str) -> list[Any]:
        """Results of all ranks, within the start's deadline."""
        begin = time.monotonic()
        pending = list(refs)
        while pending:
            self._on_progress(*self._told(phase))
            ended, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
            for ref in ended:
                try:
                    ray.get(ref)
                except RayTaskError as cause:
                    if isinstance(cause.cause, DirectoryGoneError):  # its owner died; the next engine has another made
                        raise ActorLostError(f"rank {refs.index(ref)}, {phase}: {cause.cause}") from cause
                    raise ours(cause) from cause
                except (RayActorError, ActorUnschedulableError) as cause:
                    rank = refs.index(ref)
                    raise RankLostError(rank, str(self._split.coords(rank)), 0, f"it died while {phase}") from cause
            waited = time.monotonic() - begin
            if waited > self._config.start_timeout_s:
                late = [refs.index(ref) for ref in pending]
                raise ConfigError(f"ranks {late} are still {phase} after {waited:.0f} s; see --start-timeout-s")
        try:
            return ray.get(refs, timeout=60)
        except GetTimeoutError as cause:
            raise RankLostError(-1, "unknown", 0, f"answers were lost while {phase}") from cause


def _seats(wheres: Sequence[dict[str, Any]], *, device: str) -> list[Seat]:
    on_node = Counter(where["node"] for where in wheres)
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
    return [
        Seat(
            rank=rank,
            host=where["host"],
            # Ray shows each actor only its own GPUs.
            device="cuda:0" if device == "cuda" else "cpu",
            ranks_on_node=on_node[where["node"]],
            num_threads=max(1, cpus[where["node"]] // on_node[where["node"]]),
        )
        for rank, where in enumerate(wheres)
    ]


def _device(where: dict[str, Any], seat: Seat) -> str:
    return f"cuda:{','.join(map(str, where['gpus']))}" if where["gpus"] else seat.device
