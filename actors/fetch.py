"""Downloads Hub models to the nodes that need them: one copy per node, shared by its ranks.

A download may take hours, and is abandoned only when it stalls.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import ActorLostError, ours
from actors.progress import OnProgress
from raycache.checkpoint.hub_models import fetch, pinned_models
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError
from raycache.observe import logs

_LOOK_S = 0.5
_STOP_S = 5.0


def fetch_on(nodes: Collection[str], config: Config, *, on_progress: OnProgress) -> None:
    """Download the models of a service to nodes; blocks.

    Args:
        nodes: node ids.
        config: settings with pinned revisions.
        on_progress: called with phase and fraction; an exception from it stops the downloads.
    Raises:
        RayCacheError: a download failed, or made no progress for start_timeout_s.
    """
    if not pinned_models(config):
        return
    watch = _Watch(config.start_timeout_s, num_nodes=len(set(nodes)), on_progress=on_progress)
    if set(nodes) == {ray.get_runtime_context().get_node_id()}:
        fetch(config, on_progress=watch.look)
    else:
        _fetch_by_actors(sorted(set(nodes)), config, watch=watch)


class FetchActor:
    """Downloads on its node.

    Args:
        config: of the service, pinned.
    """

    def __init__(self, config: Config) -> None:
        logs.set_up_actor(config.log_format)
        self._config = config
        self._bytes = (0, 0)
        self._is_stopping = False

    @ray.method(concurrency_group="work")
    def fetch(self) -> None:
        """Fetch everything.

        Raises:
            CheckpointError: see `hub_models.fetch`.
        """
        fetch(self._config, on_progress=self._note)

    @ray.method(concurrency_group="ask")
    def progress(self) -> tuple[int, int]:
        """Bytes downloaded, and in total."""
        return self._bytes

    @ray.method(concurrency_group="ask")
    def stop(self) -> None:
        """Make `fetch` clean up and return."""
        self._is_stopping = True

    def _note(self, done: int, total: int) -> None:
        if self._is_stopping:
            raise EngineStoppedError("stopped while downloading")
        self._bytes = (done, total)


class _Watch:
    """Reports progress of a download, and aborts one that stalls."""

    def __init__(self, timeout_s: float, *, num_nodes: int, on_progress: OnProgress) -> None:
        self._timeout_s, self._num_nodes, self._on_progress = timeout_s, num_nodes, on_progress
        self._seen, self._moved_s = (0, 0), time.monotonic()

    def look(self, done: int, total: int) -> None:
        if (done, total) != self._seen:
            self._seen, self._moved_s = (done, total), time.monotonic()
        elif time.monotonic() - self._moved_s > self._timeout_s:
            raise ConfigError(
                f"the model download has made no progress for {self._timeout_s:.0f} s ({done} of {total} bytes); check "
                "the network, or raise --start-timeout-s"
            )
        where = f" to {self._num_nodes} nodes" if self._num_nodes > 1 else ""
        self._on_progress(f"downloading {total / 1e9:.1f} GB{where}", done / total if total else 0.0)


def _fetch_by_actors(nodes: list[str], config: Config, *, watch: _Watch) -> None:
    actors, works = dict[str, Any](), dict[Any, str]()
    try:
        for node in nodes:
            options: dict[str, Any] = {"concurrency_groups": {"work": 1, "ask": 2}}
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
            actors[node] = ray.remote(num_cpus=0, max_restarts=0, **options)(FetchActor).remote(config)
            works[actors[node].fetch.remote()] = node
        told = dict.fromkeys(actors, (0, 0))
        asked = {actor.progress.remote(): node for node, actor in actors.items()}
        pending = list(works)
        while pending:
            ended, pending = ray.wait(pending, num_returns=len(pending), timeout=_LOOK_S)
            for ref in ended:
                _get(ref, node=works[ref])
            # Which nodes answer late, for their actor has yet to start, is the watch's business.
            for ref in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
                node = asked.pop(ref)
                told[node] = _get(ref, node=node)
                asked[actors[node].progress.remote()] = node
            watch.look(sum(done for done, _ in told.values()), sum(total for _, total in told.values()))
    except BaseException:  # an interrupt, too
        # In good order, or parts of files would stay; a node that does not answer is not waited for.
        ray.wait([actor.stop.remote() for actor in actors.values()], num_returns=len(actors), timeout=_STOP_S)
        ray.wait(list(works), num_returns=len(works), timeout=_STOP_S)
        raise
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _get(ref: Any, *, node: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as cause:
        raise ours(cause) from cause
    except RayActorError as cause:
        raise ActorLostError(
            f"node {node} was lost while it fetched the model: {str(cause).splitlines()[0]}"
        ) from cause
