"""The rank actors of one epoch, from creation to their end. A gang is never repaired but replaced by a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from actors.ranks import Ranks
from raycache.config import Config
from raycache.deployment.decode_split import with_transports
from raycache.deployment.deployment import Deployment
from raycache.deployment.weights import with_weights_form
from raycache.gang.meeting import Meeting
from raycache.observe.phases import Phases, slowest
from raycache.parallel.interfaces import link, require_reachable
from raycache.rank.member import RankSpec, threads_of

LOADING = "loading weights"


@dataclass(frozen=True)
class Findings:
    """What gangs tell those that replace them.

    Attributes:
        warm_nodes: ids of nodes whose disks have all kernels.
        measured_on: node, model of GPU and transports of each rank that has measured what follows; empty before there
            was a gang.
        reserved: by each rank, GPU memory for steps: purpose -> bytes.
        longest_pieces: of each rank, tokens of the longest step that is recorded in pieces, None if none can be.
    """

    warm_nodes: frozenset[str] = frozenset()
    measured_on: tuple[Any, ...] = ()
    reserved: tuple[Mapping[str, int], ...] = ()
    longest_pieces: tuple[int | None, ...] = ()


class Gang:
    """Rank actors of one epoch.

    Args:
        config: settings that name the model on the Hub, of which every node has its own copy.
        ranks: of this gang; it ends them.
        epoch: number of this gang; handles of other epochs are rejected.
        arenas: node id -> file of the host tier there, which only one gang at a time moves rows in; empty without one.
        wait_for_arenas: called when the ranks before these have been ended; returns once none of them uses an arena.
        phases: of the start, which is added to them.
        findings: of gangs before. With a rank on a node that had none, all ranks run steps of all kinds before they
            are ready. With other nodes, GPUs or transports than before, they measure memory and which steps are worth
            recording.
    Raises:
        RayCacheError: a rank failed to start; no actor is left behind.

    Attributes:
        deployment: the ranks' deployment, including the form of their weights and whether they use peer memory.
        executor: pass it to an engine.
        num_pages: pages per rank.
        rows: one per rank, for status output.
        gpus: of each rank.
        findings: of this gang and those before.
    """

    def __init__(
        self,
        deployment: Deployment,
        config: Config,
        *,
        ranks: Ranks,
        epoch: int,
        arenas: Mapping[str, Path],
        wait_for_arenas: Callable[[], None],
        phases: Phases,
        findings: Findings,
    ) -> None:
        self._ranks = ranks
        executor = None
        try:
            wheres = self._ranks.where()
            phases.end("ranks started", of_it={"old ranks gone": max(where["waited_s"] for where in wheres)})
            wait_for_arenas()
            phases.end("host tier free")
            self.deployment = with_weights_form(deployment, [where["gpu"] for where in wheres if where["gpu"]])
            specs = _specs(wheres, config, device=deployment.device_type)
            config = replace(config, weights=self.deployment.config.weights)
            self._meeting = meeting = _meeting(config, wheres, device_type=deployment.device_type, epoch=epoch)
            try:
                boards = self._ranks.boards(meeting, [where["node"] for where in wheres])
                invitations = [(each,) for each in meeting.invitations(specs, boards)]
                executor, transports = meeting.join(
                    lambda: self._ranks.ask("join", invitations, phase="joining groups")
                )
            finally:
                meeting.board.unshare()
            phases.end("groups")
            self.deployment = with_transports(self.deployment, transports)
            phases.end("other", of_it=slowest(self._build(wheres, transports, arenas, findings)))
        except BaseException:  # an interrupt, too: the actors would stay
            if executor is not None:
                executor.abandon()
            self._ranks.end()
            raise
        self.executor = executor
        self.gpus = [where["gpus"] for where in wheres]
        self.rows = [
            {
                "rank": spec.rank,
                "coords": str(config.split.coords(spec.rank)),
                "node": spec.host,
                "device": _device(where, spec),
                "transport": ", ".join(used),
            }
            for spec, where, used in zip(specs, wheres, transports, strict=True)
        ]
        self._ranks.run()
        executor.watch(self._ranks)

    def _build(
        self,
        wheres: Sequence[dict[str, Any]],
        transports: Sequence[tuple[str, ...]],
        arenas: Mapping[str, Path],
        findings: Findings,
    ) -> list[Mapping[str, float]]:
        """Load the weights and build all ranks; returns the seconds of each one's start by phase."""
        nodes, has_peers = [where["node"] for where in wheres], self.deployment.config.peer_memory
        on = tuple((where["node"], where["gpu"], *used) for where, used in zip(wheres, transports, strict=True))
        is_known, unknown = on == findings.measured_on, (None,) * len(on)
        loads = [(own,) for own in (findings.reserved if is_known else unknown)]
        loaded = self._ranks.ask("load", loads, phase=LOADING, board=self._meeting.board, peer_memory=has_peers)
        self.num_pages = min(num_pages for num_pages, _ in loaded)
        longest = findings.longest_pieces if is_known and None not in findings.longest_pieces else unknown
        files = [arenas[node] if arenas else None for node in nodes]
        builds = [(self.num_pages, *own) for own in zip(files, longest, strict=True)]
        warms_up = not findings.warm_nodes.issuperset(nodes)
        built = self._ranks.ask("build", builds, phase="making pools", warms_up=warms_up)
        self.findings = Findings(
            findings.warm_nodes.union(nodes),
            on,
            tuple(reserved for _, reserved in loaded),
            tuple(longest for _, longest in built),
        )
        return [seconds for seconds, _ in built]

    def join(self, timeout_s: float) -> None:
        """Wait for the ranks to end after their last plan, then remove them."""
        self._ranks.join(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill all ranks. They are gone before the next gang starts."""
        self.executor.abandon()
        self._ranks.end()


def _meeting(config: Config, wheres: Sequence[dict[str, Any]], *, device_type: str, epoch: int) -> Meeting:
    mine = link(config.interface, node_address=ray.util.get_node_ip_address())
    require_reachable({"the engine": mine, **{f"rank {i}": where["link"] for i, where in enumerate(wheres)}})
    return Meeting(
        config,
        device_type=device_type,
        epoch=epoch,
        host=mine.host,
        nodes=[where["node"] for where in wheres],
        here=ray.get_runtime_context().get_node_id(),
        plan_timeout_s=config.rank_timeout_s,
    )


def _specs(wheres: Sequence[dict[str, Any]], config: Config, *, device: str) -> list[RankSpec]:
    on_node = Counter(where["node"] for where in wheres)
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
    return [
        RankSpec(
            rank=rank,
            host=where["host"],
            # Ray shows each actor only its own GPUs.
            device="cuda:0" if device == "cuda" else "cpu",
            ranks_on_node=on_node[where["node"]],
            num_threads=threads_of(config, cpus=cpus[where["node"]], ranks_on_node=on_node[where["node"]]),
        )
        for rank, where in enumerate(wheres)
    ]


def _device(where: dict[str, Any], spec: RankSpec) -> str:
    ids = where["gpus"].ids
    return f"cuda:{','.join(map(str, ids))}" if ids else spec.device
