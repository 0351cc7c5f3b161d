"""Starts and stops the engines of replicas."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace

from actors.fetch import fetch_on
from actors.front import RayEngine
from actors.placement import reserve
from actors.progress import OnProgress
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError
from raycache.types import EngineInfo

_log = logging.getLogger(__name__)

REPLICA = "{replica}"
"""Placeholder for the replica's name in a storage URL."""

Started = tuple[RayEngine, EngineInfo]


class Starter:
    """Starts and stops engines, each with its own resources. All methods block: call them from threads.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, config: Config, *, device: str) -> None:
        self._config, self._device = config, device
        self._is_stopping = False
        self._engines: set[RayEngine] = set()

    def start(self, name: str, *, on_progress: OnProgress) -> Started:
        """Start an engine and wait until it serves.

        Args:
            on_progress: called with the phase and the fraction of it that is done.
        Raises:
            RayCacheError: the start failed; everything is cleaned up.
        """

        def tell(phase: str, share: float) -> None:
            if self._is_stopping:
                raise EngineStoppedError(f"stopped while {phase}")
            on_progress(phase, share)

        config = replace(self._config, storage=self._config.storage.replace(REPLICA, name))
        placement = reserve(
            config, device=self._device, on_wait=lambda missing: tell(f"waiting for Ray: {missing}", 0.0)
        )
        for line in placement.warnings:
            _log.warning("%s", line)
        try:
            fetch_on(placement.nodes, config, on_progress=tell)
        except BaseException:  # an interrupt, too: Ray would keep the resources reserved
            placement.remove()
            raise
        engine = RayEngine(config, device=self._device, placement=placement, replica=name)
        self._engines.add(engine)
        try:
            return engine, engine.wait_ready(timeout_s=config.start_timeout_s, on_progress=tell)
        except BaseException:  # an interrupt, too: its actors would go on
            self.end(engine)
            raise

    def end(self, engine: RayEngine) -> None:
        """Stop an engine."""
        engine.stop()
        self._engines.discard(engine)

    def stop(self) -> None:
        """Stop all engines in parallel, including starting ones."""
        self._is_stopping = True
        if engines := list(self._engines):
            with ThreadPoolExecutor(len(engines)) as pool:
                list(pool.map(self.end, engines))

    def start_all(self, *, on_progress: OnProgress) -> dict[str, Started]:
        """Start the configured number of replicas in parallel and wait until all serve.

        Args:
            on_progress: called with the phase of one replica that is not ready, and the fraction of it that is done.
        Returns:
            Engines by name.
        Raises:
            RayCacheError: one failed to start; all are stopped.
        """
        check_replicas(self._config, self._config.replicas)
        names = [str(number) for number in range(self._config.replicas)]
        if len(names) == 1:
            return {"0": self.start("0", on_progress=on_progress)}

        behind = list(names)

        def start(name: str) -> Started:
            def tell(phase: str, share: float) -> None:
                if name == behind[0]:
                    on_progress(f"{phase} of replica {name}", share)

            started = self.start(name, on_progress=tell)
            behind.remove(name)
            return started

        with ThreadPoolExecutor(len(names)) as pool:
            starts = {name: pool.submit(start, name) for name in names}
            done, _ = wait(starts.values(), return_when=FIRST_EXCEPTION)
            failure = next((error for one in done if (error := one.exception()) is not None), None)
            if failure is not None:
                self._is_stopping = True  # the others need not go on
        if failure is not None:
            self.stop()
            raise failure
        return {name: one.result() for name, one in starts.items()}


def check_replicas(config: Config, count: int) -> None:
    """Check that `count` replicas can run at the same time.

    Raises:
        ConfigError: they cannot share the storage, or the placement names the nodes of one.
    """
    if count > 1:
        check_storage(config.storage)
        if config.placement != "auto":
            raise ConfigError(
                f"placement={config.placement} names the nodes of one replica, not of {count}; use placement=auto"
            )


def check_storage(url: str) -> None:
    """Check that several replicas can share a storage.

    Raises:
        ConfigError: it is a directory, which only one replica can use.
    """
    if url.removeprefix("faulty+").startswith("file:") and REPLICA not in url:
        raise ConfigError(
            "only one replica at a time can use a directory; use a shared storage, such as s3:// or redis://, or a "
            f"directory for each: file:///DIR/{REPLICA}?size=50GiB"
        )
