"""Starting and ending the engines of replicas, each with resources of its own; blocks, for threads."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
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
"""In the URL of a storage: the replica's name."""

Started = tuple[RayEngine, EngineInfo]


class Starter:
    """Starts engines, each with resources of its own, and ends them; blocks, for threads.

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
            on_progress: told phase and share.
        Raises:
            RayCacheError: why it does not; nothing is left of it.
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
        except BaseException:
            placement.remove()
            raise
        engine = RayEngine(config, device=self._device, placement=placement, replica=name)
        self._engines.add(engine)
        try:
            return engine, engine.wait_ready(timeout_s=config.start_timeout_s, on_progress=tell)
        except BaseException:
            self.end(engine)
            raise

    def end(self, engine: RayEngine) -> None:
        """Stop an engine."""
        engine.stop()
        self._engines.discard(engine)

    def stop(self) -> None:
        """Stop all engines at the same time, also those that start."""
        self._is_stopping = True
        if engines := list(self._engines):
            with ThreadPoolExecutor(len(engines)) as pool:
                list(pool.map(self.end, engines))

    def start_all(self, *, on_progress: OnProgress) -> dict[str, Started]:
        """Start as many as are set, at the same time, and wait until all serve.

        Args:
            on_progress: told phase and share of one of them.
        Returns:
            Name -> engine.
        Raises:
            RayCacheError: why one does not; nothing is left of any.
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

            try:
                started = self.start(name, on_progress=tell)
                behind.remove(name)
                return started
            except BaseException as error:
                if not self._is_stopping:
                    failures.append(error)
                self._is_stopping = True  # the others need not go on
                raise

        failures: list[BaseException] = []
        with ThreadPoolExecutor(len(names)) as pool:
            starts = {name: pool.submit(start, name) for name in names}
        if failures:
            self.stop()
            raise failures[0]
        return {name: one.result() for name, one in starts.items()}


def check_replicas(config: Config, count: int) -> None:
    """Refuse what so many replicas at a time cannot share.

    Raises:
        ConfigError: says what would work.
    """
    if count > 1:
        check_storage(config.storage)
        if config.placement != "auto":
            raise ConfigError(
                f"placement={config.placement} names the nodes of one replica, and there are to be {count}; use "
                "placement=auto"
            )


def check_storage(url: str) -> None:
    """Refuse a storage that several replicas cannot share.

    Raises:
        ConfigError: says what would work.
    """
    if url.removeprefix("faulty+").startswith("file:") and REPLICA not in url:
        raise ConfigError(
            "a directory belongs to one replica at a time; use a storage that replicas share, such as s3:// or "
            f"redis://, or a directory for each: file:///DIR/{REPLICA}?size=50GiB"
        )
