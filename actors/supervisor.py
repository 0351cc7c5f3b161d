"""Keeps one engine running: replaces a lost one, on other nodes if the former ones are lost or draining."""

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
"""Consecutive losses, without a token or `_STEADY_S` of running in between, before the service gives up."""
_STEADY_S = 120.0
"""Running time after which the loss of an engine no longer counts as a failed start."""
_PROGRESS_S = 0.1
"""Polling interval during a start."""
_EPOCHS_PER_ENGINE = 1_000_000


class Supervisor:
    """Runs one engine at a time. All methods but `is_serving` and `note_token` block: call them from threads.

    Args:
        device: "cpu" or "cuda".
        placement: of the first engine's ranks; the supervisor releases it.
        replica: name of the replica.
    Attributes:
        engine: the latest engine, which may still be starting.
        arenas: owners of its host tier.
        num_lost: number of engines before it.
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
        """Whether an engine is the current one and is not being replaced."""
        return engine is self.engine and not self._is_replacing

    def note_token(self) -> None:
        """Note that the engine has generated a token, which resets the count of losses."""
        self._losses = 0

    def wait_ready(self, *, timeout_s: float, on_progress: OnProgress) -> EngineInfo:
        """Wait until the first engine's ranks run.

        Raises:
            RayCacheError: the start failed.
        """
        self._until_ready(timeout_s=timeout_s, on_progress=on_progress)
        info: EngineInfo = self.engine.ask_now("info")
        # Later engines keep this pool size: requests were accepted for it.
        self._config = replace(self._config, num_pages=info.num_pages)
        return info

    def replace_engine(self, error: RayCacheError, *, on_progress: OnProgress) -> None:
        """Start engines until one is ready.

        Args:
            error: why the latest one was lost.
        Raises:
            EngineStoppedError: `stop` was called meanwhile.
            RayCacheError: too many engines were lost, or none can start.
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
            self.engine.kill()  # it may only be unresponsive, and must not come back
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
                self._end_if_stopping()  # `stop` may have stopped only its predecessor
                self._until_ready(timeout_s=self._config.start_timeout_s, on_progress=tell)
                break
            except (ActorLostError, RankLostError, DirectoryGoneError) as cause:
                error = cause
                _log.warning("%s; starting another engine", error)
        self._ready_s, self._is_replacing = time.monotonic(), False

    def stop(self) -> None:
        """Stop engine, ranks and host tier; returns when they have ended, or after a timeout."""
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
        phase = "no reply"
        while (left_s := deadline - time.monotonic()) > 0:
            phase, share = self.engine.ask_now("progress", timeout_s=left_s)
            on_progress(phase, share)
            if phase == "ready":
                return
            time.sleep(_PROGRESS_S)
        raise ConfigError(f"the ranks are not ready after {timeout_s:.0f} s ({phase}); see --start-timeout-s")

    def _move_if_leaving(self, tell: OnProgress) -> bool:
        """Place ranks and host tier elsewhere if one of their nodes is lost or draining; returns whether one is.

        Raises:
            ConfigError: no resources are free within start_timeout_s.
        """
        try:
            departing = departing_nodes(self._placement.nodes)
        except OSError as cause:
            _log.warning("%s", cause)
            return False
        if not departing:
            return False
        self._placement = self._placement.again(
            excluding=departing.lost | departing.draining,
            on_wait=lambda lacks: tell(f"waiting for resources: {lacks}", 0.0),
        )
        self._end_if_stopping()
        for line in self._placement.warnings:
            _log.warning("%s", line)
        self.arenas = self.arenas.moved(self._placement.nodes, timeout_s=STOP_TIMEOUT_S)
        self._end_if_stopping()
        return True

    def _end_if_stopping(self) -> None:
        """Stop what was started after `stop` was called.

        Raises:
            EngineStoppedError: `stop` was called.
        """
        if self._is_stopping:
            self.engine.kill()
            self._end_tiers()
            raise EngineStoppedError("the server is stopping")

    def _end_tiers(self) -> None:
        self.arenas.close(timeout_s=STOP_TIMEOUT_S)
        self._placement.remove()
