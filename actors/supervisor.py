"""Keeps one engine running: starts the next when one is lost, on other nodes when those of its ranks go away."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from actors.answers import ActorLostError
from actors.arena import Arenas
from actors.drain import departing_nodes
from actors.fetch import fetch_on
from actors.handle import STOP_TIMEOUT_S, EngineHandle
from actors.placement import Placement
from actors.progress import OnProgress
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError, RankLostError, RayCacheError
from raycache.host.directory import DirectoryGoneError
from raycache.types import EngineInfo

_log = logging.getLogger(__name__)
_MAX_LOSSES = 4
"""Engines that may be lost one after another, none of which ran for long or gave a token, before the service ends."""
_STEADY_S = 120.0
"""An engine that has run for so long was not lost by its own start."""
_PROGRESS_S = 0.1
"""Between two questions how far a start is."""
_EPOCHS_PER_ENGINE = 1_000_000


class Supervisor:
    """One engine after another, never two at a time. All methods but `is_serving` and `note_token` block: for threads.

    Args:
        device: "cpu" or "cuda".
        placement: of the first engine's ranks; the supervisor releases it.
        replica: name of this engine among others.

    Attributes:
        engine: the latest, which may still be starting.
        arenas: owners of its host tier.
        num_lost: engines before it.
    """

    def __init__(self, config: Config, *, device: str, placement: Placement, replica: str) -> None:
        self._config, self._device, self._placement, self._replica = config, device, placement, replica
        self._is_stopping = self._is_replacing = False
        self._losses = 0
        self._ready_s = time.monotonic()
        self.num_lost = 0
        self.arenas = Arenas.start(config, placement.nodes, replica=replica)
        self.engine = self._new_engine()

    def is_serving(self, engine: EngineHandle) -> bool:
        """Whether an engine is the latest, and has not been found lost."""
        return engine is self.engine and not self._is_replacing

    def note_token(self) -> None:
        """The engine has given a token, so it is worth having another one when it is lost."""
        self._losses = 0

    def wait_ready(self, *, timeout_s: float, on_progress: OnProgress) -> EngineInfo:
        """Wait until the first engine's ranks run.

        Raises:
            RayCacheError: why the start failed.
        """
        self._until_ready(timeout_s=timeout_s, on_progress=on_progress)
        info: EngineInfo = self.engine.ask_now("info")
        # The pool must not change under requests that were accepted for it.
        self._config = replace(self._config, num_pages=info.num_pages)
        return info

    def replace_engine(self, error: RayCacheError, *, on_progress: OnProgress) -> None:
        """Start engines until one is ready.

        Args:
            error: why the latest one is lost.
        Raises:
            EngineStoppedError: `stop` was called meanwhile.
            RayCacheError: too many were lost, or none can start any more.
        """

        def tell(phase: str, share: float) -> None:
            self._end_if_stopping()
            on_progress(phase, share)

        self._is_replacing = True
        if time.monotonic() - self._ready_s > _STEADY_S:
            self._losses = 0
        must_fetch = False
        while True:
            tell(str(error), 0.0)
            self.engine.kill()  # one that only says nothing must not come back
            has_moved = self._move_if_leaving(tell)
            if not has_moved:
                self._losses += 1
            if self._losses > _MAX_LOSSES:
                raise error
            try:
                must_fetch = must_fetch or has_moved
                if must_fetch:
                    fetch_on(self._placement.nodes, self._config, on_progress=tell)
                    must_fetch = False
                self.num_lost += 1
                self.engine = self._new_engine()
                self._end_if_stopping()  # `stop` may have ended the one before, and this one tells of no progress
                self._until_ready(timeout_s=self._config.start_timeout_s, on_progress=tell)
                break
            except (ActorLostError, RankLostError, DirectoryGoneError) as cause:
                error = cause
                _log.warning("%s; starting another one", error)
        self._ready_s, self._is_replacing = time.monotonic(), False

    def stop(self) -> None:
        """End engine, ranks and host tier; returns when they are gone, or after a deadline."""
        self._is_stopping = True
        self.engine.stop()
        self._end_tiers()

    def _new_engine(self) -> EngineHandle:
        return EngineHandle(
            self._config,
            device=self._device,
            placement=self._placement,
            arenas=self.arenas,
            epoch=self.num_lost * _EPOCHS_PER_ENGINE,
            replica=self._replica,
        )

    def _until_ready(self, *, timeout_s: float, on_progress: OnProgress) -> None:
        deadline = time.monotonic() + timeout_s
        phase = "not heard of"
        while (left_s := deadline - time.monotonic()) > 0:
            phase, share = self.engine.ask_now("progress", timeout_s=left_s)
            on_progress(phase, share)
            if phase == "ready":
                return
            time.sleep(_PROGRESS_S)
        raise ConfigError(f"the ranks are not ready after {timeout_s:.0f} s ({phase}); see --start-timeout-s")

    def _move_if_leaving(self, tell: OnProgress) -> bool:
        """Place ranks and host tier elsewhere if a node of theirs goes away; whether one does.

        Raises:
            ConfigError: there are no resources within start_timeout_s.
        """
        try:
            departing = departing_nodes(self._placement.nodes)
        except OSError as cause:
            _log.warning("%s", cause)
            return False
        if not departing:
            return False
        self._placement = self._placement.again(
            excluding=departing.lost | departing.draining, on_wait=lambda lacks: tell(f"waiting for room: {lacks}", 0.0)
        )
        self._end_if_stopping()
        for line in self._placement.warnings:
            _log.warning("%s", line)
        self.arenas = self.arenas.moved(self._placement.nodes, timeout_s=STOP_TIMEOUT_S)
        self._end_if_stopping()
        return True

    def _end_if_stopping(self) -> None:
        """End what was made after `stop` has looked.

        Raises:
            EngineStoppedError: it was called.
        """
        if self._is_stopping:
            self.engine.kill()
            self._end_tiers()
            raise EngineStoppedError("the server is stopping")

    def _end_tiers(self) -> None:
        self.arenas.close(timeout_s=STOP_TIMEOUT_S)
        self._placement.remove()
