"""What /metrics shows, in Ray's metrics too: Ray's agents hand them to the Prometheus that watches the cluster.

The front end publishes: it knows all replicas, storage and lost engines, and sees the latencies. Every few seconds and
in a thread, so that no token waits for it.

All of them are gauges there, of the names that counters and histograms have in Prometheus, which asks for no more: a
counter of Ray is not there before it counts, so that nobody would see it leave 0, and histograms are counted again from
the middles of their buckets, with wrong sums.
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
from raycache.observe.metrics import Metrics

_EVERY_S = 2.0
_ANSWER_S = 10.0

_log = logging.getLogger(__name__)


class RayMetrics:
    """Metrics of this process in Ray, which has to be connected."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def publish(self, families: Iterable[Family]) -> None:
        """Tell Ray what they show now."""
        for family in families:
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                if sample.name not in self._gauges:
                    self._gauges[sample.name] = Gauge(sample.name, family.documentation, tag_keys=tuple(sample.labels))
                self._gauges[sample.name].set(sample.value, tags=dict(sample.labels))


@asynccontextmanager
async def publishing(
    engine: AsyncEngine, metrics: Metrics, *, has_front: bool = True, every_s: float = _EVERY_S
) -> AsyncIterator[None]:
    """Publish as long as the block lasts.

    Args:
        has_front: whether what the front end sees is published, too; not if it is in other processes.
        every_s: seconds between two times.
    """
    task = asyncio.create_task(_publish(engine, metrics, has_front=has_front, every_s=every_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def publish_front(metrics: Metrics, *, every_s: float = _EVERY_S) -> None:
    """Publish what a front end without engines sees, from a thread that ends with the process."""

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
    """Rounds of publishing. One that fails ends neither those after it nor the service."""

    def __init__(self) -> None:
        self._is_told = False

    @contextmanager
    def next(self) -> Iterator[None]:
        """A round; the log gets its failure, and of more in a row the first one only."""
        try:
            yield
            self._is_told = False
        except Exception:  # the last resort: figures that stay away in silence are missed when they are needed
            if not self._is_told:
                _log.exception("the metrics could not be published; they are tried again every few seconds")
            self._is_told = True
