"""Publishes the metrics of /metrics as Ray metrics too, for the Prometheus that scrapes Ray's agents.

The front end publishes them, since it sees all replicas and the latencies; every few seconds and in a thread, so that
no token is delayed.

They are all Ray gauges with the names of Prometheus counters and histograms, which is all that queries need. A Ray
counter does not exist before its first increment, which `rate` then misses; Ray histograms have wrong sums, since they
are rebuilt from the middles of their buckets.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from prometheus_client.metrics_core import Metric as Family
from ray.util.metrics import Gauge

from raycache.api.engine import AsyncEngine
from raycache.errors import EngineStoppedError
from raycache.observe.aliases import aliases, deployment_requests
from raycache.observe.metrics import Metrics

_EVERY_S = 2.0
_ANSWER_S = 10.0

_log = logging.getLogger(__name__)


class RayMetrics:
    """Publishes metrics of this process, which must be connected to Ray."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def publish(self, families: Iterable[Family]) -> None:
        """Set Ray's gauges to the current values, also under the names that Ray's boards for LLMs read."""
        families = list(families)
        for family in (*families, *aliases(families), *deployment_requests(families)):
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                name = sample.name.replace(":", "_")
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, family.documentation, tag_keys=tuple(sample.labels))
                self._gauges[name].set(sample.value, tags=dict(sample.labels))


@asynccontextmanager
async def publishing(
    engine: AsyncEngine, metrics: Metrics, *, has_front: bool = True, every_s: float = _EVERY_S
) -> AsyncIterator[None]:
    """Publish metrics for the duration of the `with` block.

    Args:
        has_front: whether to include the front end's metrics; False if it runs in other processes.
        every_s: seconds between updates.
    """
    task = asyncio.create_task(_publish(engine, metrics, has_front=has_front, every_s=every_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def publish_front(metrics: Metrics, *, every_s: float = _EVERY_S) -> None:
    """Publish only the front end's metrics, from a daemon thread."""

    def run() -> None:
        ray_metrics, rounds = RayMetrics(), _Rounds()
        while True:
            with rounds.next():
                ray_metrics.publish(metrics.families(of_engines=False))
            time.sleep(every_s)

    threading.Thread(target=run, name="metrics", daemon=True).start()


async def _publish(engine: AsyncEngine, metrics: Metrics, *, has_front: bool, every_s: float) -> None:
    ray_metrics, rounds = RayMetrics(), _Rounds()
    while True:
        with rounds.next():
            try:
                async with asyncio.timeout(_ANSWER_S):
                    metrics.show(await engine.stats())
            except (EngineStoppedError, TimeoutError):
                metrics.show(None)
            await asyncio.to_thread(ray_metrics.publish, metrics.families(of_front=has_front))
        await asyncio.sleep(every_s)


class _Rounds:
    """Rounds of publishing; a failed one stops neither later ones nor the service."""

    def __init__(self) -> None:
        self._is_told = False

    @contextmanager
    def next(self) -> Iterator[None]:
        """One round; of consecutive failures only the first is logged."""
        try:
            yield
            self._is_told = False
        except Exception:  # last resort: log it instead of silently losing all metrics
            if not self._is_told:
                _log.exception("could not publish metrics; retrying every few seconds")
            self._is_told = True
