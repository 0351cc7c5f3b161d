"""Successive gangs of one engine, one per epoch, and their host tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.answers import ActorLostError
from actors.arena import Arenas
from actors.placement import Placement
from actors.progress import OnProgress
from actors.ranks import Ranks
from raycache.config import Config
from raycache.errors import RankLostError
from raycache.observe.phases import Phases

if TYPE_CHECKING:
    from actors.gang import Gang
    from actors.rank import Gpus
    from raycache.deployment.deployment import Deployment
    from raycache.host.link import HostLink

_log = logging.getLogger(__name__)
_MAX_REBUILDS = 4
"""Successive gangs that may be lost without completing a step before the engine gives up."""
_KILL_TIMEOUT_S = 60.0
"""How long to wait for a killed rank to die; Ray takes some seconds if it does not respond."""
_SPARES_AFTER_S = 3.0
"""How long a gang runs before others are started that stand by for it: its first steps need the cores, above all when
requests waited for it."""
_CHECK_SPARES_S = 5.0
"""How often to look for ranks that stand by and have died; twice as long after each time that there were some."""
_MOST_CHECK_S = 300.0
_JOIN_S = 5.0
"""How long to wait for ranks to end after their last plan."""


class Gangs:
    """Starts gangs, one at a time, with increasing epochs.

    Args:
        config: settings that name the model on the Hub, of which every node has its own copy.
        arenas: owners of the host tier.
        epoch: epoch of the last gang before the first of these.
        log_fields: added to every log line of this process.

    Attributes:
        epoch: epoch of the latest gang.
        rebuilds: number of gangs that replaced a lost one.
        lost_at, rebuild_s: when the last loss of a gang was noticed, in seconds since 1970, and the phases of its
            replacement; see `EngineStats`.
    """

    def __init__(
        self,
        config: Config,
        *,
        placement: Placement,
        arenas: Arenas,
        epoch: int,
        replica: str,
        log_fields: dict[str, object],
    ) -> None:
        self._config, self._placement, self._replica, self._log_fields = config, placement, replica, log_fields
        self._owners = arenas.owners()
        self._files: dict[str, Path] = {}
        self._ranks: Ranks | None = None
        self._gang: Gang | None = None
        self._losses = 0
        self._ready_s = 0.0
        self._check_s, self._checked_s = _CHECK_SPARES_S, 0.0
        self.epoch = epoch
        self.rebuilds = 0
        self.lost_at = 0.0
        self.rebuild_s: Mapping[str, float] = {}

    def start_ranks(self, *, on_progress: OnProgress) -> None:
        """Start the processes of the next gang's ranks, ahead of `start`."""
        assert self._ranks is None, "one gang at a time"
        self._ranks = self._new_ranks(on_progress=on_progress)

    def _new_ranks(self, *, on_progress: OnProgress, gpus: Sequence[Gpus] = ()) -> Ranks:
        return Ranks(
            self._config,
            placement=self._placement,
            epoch=self.epoch + 1,
            replica=self._replica,
            on_progress=on_progress,
            gpus=gpus,
        )

    def open_host(self, deployment: Deployment, *, on_progress: OnProgress) -> HostLink | None:
        """Make the arena, or reuse a previous engine's with its size; None without a host tier."""
        if not self._owners:
            return None
        from raycache.host.link import HostLink
        from raycache.host.nodes import open_all, work_on_all

        on_progress("making the host tier", 0.0)
        node_ids = list(dict.fromkeys(self._placement.nodes))
        nodes = tuple(map(node_ids.index, self._placement.nodes))
        opened = open_all(self._owners, deployment, epoch=self.epoch, nodes=nodes)
        self._files = {node: each.path for node, each in zip(node_ids, opened, strict=True)}
        return HostLink(
            path=opened[0].path,
            sizes=opened[0].spec.sizes,
            work=work_on_all([owner.work for owner in self._owners]),
            has_storage=all(each.spec.storage for each in opened),
            epoch=self.epoch,
            nodes=nodes if len(node_ids) > 1 else (),
        )

    def start(self, deployment: Deployment, *, on_progress: OnProgress) -> Gang:
        """Start the first gang.

        Raises:
            RayCacheError: a rank failed to start.
        """
        return self._start(deployment, on_progress=on_progress, phases=Phases())

    def _start(self, deployment: Deployment, *, on_progress: OnProgress, phases: Phases) -> Gang:
        """Start the gang of the next epoch."""
        from actors.gang import Findings, Gang

        if self._ranks is None:
            self.start_ranks(on_progress=on_progress)
        self.epoch += 1
        self._log_fields["epoch"] = self.epoch
        fixed = deployment.config
        config = replace(self._config, pp_layers=fixed.pp_layers, num_pages=fixed.num_pages, weights=fixed.weights)
        ranks, self._ranks = self._ranks, None
        assert ranks is not None, "started above"
        self._gang = Gang(
            deployment,
            config,
            ranks=ranks,
            epoch=self.epoch,
            arenas=self._files,
            wait_for_arenas=self._wait_for_arenas,
            phases=phases,
            findings=Findings() if self._gang is None else self._gang.findings,
        )
        _log.info("epoch %d runs on %d ranks", self.epoch, config.world_size)
        self._ready_s = time.monotonic()
        return self._gang

    def keep_spares(self, *, on_progress: OnProgress) -> None:
        """Start ranks that stand by for the running gang once it runs for some seconds, and replace those that died."""
        gang, now_s = self._gang, time.monotonic()
        assert gang is not None, "steps come after the start"
        if self._ranks is None:
            is_due = now_s - self._ready_s > _SPARES_AFTER_S
            if is_due and self._config.has_spare_ranks(device_type=gang.deployment.device_type):
                self._ranks = self._new_ranks(on_progress=on_progress, gpus=gang.gpus)
                self._check_s, self._checked_s = _CHECK_SPARES_S, now_s
        elif now_s - self._checked_s > self._check_s:
            self._checked_s = now_s
            is_lost = self._ranks.replace_lost(waits=False)
            # Whatever ends them may do so again.
            self._check_s = min(2 * self._check_s, _MOST_CHECK_S) if is_lost else _CHECK_SPARES_S

    def _wait_for_arenas(self) -> None:
        """Wait for ranks of a lost gang that may still be writing to an arena."""
        from raycache.host.nodes import are_all_gone

        if self._files and not are_all_gone(self._owners, timeout_s=_KILL_TIMEOUT_S):
            raise ActorLostError(f"ranks of the previous gang still use the host tier after {_KILL_TIMEOUT_S:.0f} s")

    def replace(self, error: RankLostError, *, on_progress: OnProgress, on_loss: Callable[[str], None]) -> Gang:
        """End a lost gang, and start new ones until one succeeds: ranks can also be lost during startup.

        Args:
            on_loss: called with a message about the loss and the next attempt.
        Raises:
            RankLostError: too many gangs were lost.
        """
        lost, phases = self._gang, Phases()
        self.lost_at = time.time()
        assert lost is not None, "steps come after the start"
        lost.kill()
        if self._ranks is not None:
            self._ranks.replace_lost(waits=True)
        # Neither the pool nor the form of the weights may change under requests that were accepted for them.
        weights = "stored" if lost.deployment.config.weights == "auto" else lost.deployment.config.weights
        config = replace(lost.deployment.config, num_pages=lost.num_pages, weights=weights)
        deployment = replace(lost.deployment, config=config)
        while self._losses < _MAX_REBUILDS:
            self._losses += 1
            self.rebuilds += 1
            on_loss(f"{error}; rebuilding the gang as epoch {self.epoch + 1}")
            try:
                gang = self._start(deployment, on_progress=on_progress, phases=phases)
            except RankLostError as cause:
                error = cause
            else:
                self.rebuild_s = phases.seconds
                return gang
        raise error

    def note_step(self) -> None:
        """Record that the latest gang has completed a step."""
        self._losses = 0

    def end(self, *, has_last_plan: bool) -> None:
        """End the latest gang: wait for its ranks if they were sent their last plan, else kill them."""
        if self._ranks is not None:
            self._ranks.end()
        if self._gang is None:
            return
        if has_last_plan:
            self._gang.join(_JOIN_S)
        else:
            self._gang.kill()
