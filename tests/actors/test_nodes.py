"""Nodes that come and go under a service: one that drains, that of the engine, one without it; the same tokens as
without. Several Ray nodes on this machine, which share an address but nothing else that matters here."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

from raycache.errors import ConfigError
from raycache.types import CacheAction, CacheCommand
from tests.actors.serving import Service, serving
from tests.actors.test_survival import Heard, listen, prompts, spoken
from tests.unit.storage_media import redis_server

_PAGE = 16
_WHOLE = 4 * _PAGE
"""Tokens of the whole pages of a prompt here."""
_HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}


class Nodes:
    """A cluster whose head has no CPU, so that every rank gets a node of its own as long as there are enough."""

    def __init__(self) -> None:
        # Or it would be what others on this machine find as "auto".
        self._folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rc", dir="/tmp")
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _HEALTH}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        for _ in range(3):
            self.add()
        ray.init(address=self._cluster.address, namespace="raycache", logging_level=logging.ERROR, log_to_driver=False)

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=1)
        self._nodes[node.node_id] = node

    def kill(self, node_id: str) -> None:
        """Kill all of its processes."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def drain(self, node_id: str, *, left_s: float) -> None:
        """As an autoscaler does before a cloud takes a machine back."""
        deadline_ms = int((time.time() + left_s) * 1000)
        client = global_worker.gcs_client
        is_accepted, why = client.drain_node(node_id, DRAIN_NODE_REASON_PREEMPTION, "spot", deadline_ms)
        assert is_accepted, why

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


async def ask(service: Service, prompt: Sequence[int]) -> Heard:
    return await listen(service, prompt, 30, Heard(), temperature=0)


async def clear(service: Service, *tiers: str) -> None:
    await service.engine.admin(CacheCommand(CacheAction.CLEAR, tiers=tiers))


def nodes_of(service: Service) -> list[str]:
    return list(service.engine._supervisor.engine.placement.nodes)


async def until_moved(service: Service, node: str) -> None:
    """Wait until the gang has left a node and runs."""
    deadline = time.monotonic() + 120
    while node in nodes_of(service) or service.engine.away:
        assert time.monotonic() < deadline, f"{service.engine.away}, on {nodes_of(service)}"
        await asyncio.sleep(0.1)


async def under_load(service: Service, cases: list[list[int]], calm: list[Heard], node: str, leave: Any) -> None:
    """Have a node leave while requests run; every one of them ends as it does in calm times."""
    heard = [Heard() for _ in cases]
    running = [
        asyncio.create_task(listen(service, prompt, 300, into, temperature=0))
        for prompt, into in zip(cases, heard, strict=True)
    ]
    await spoken(heard, at_least=10)
    leave(node)
    await asyncio.gather(*running)
    await until_moved(service, node)
    for before, after in zip(calm, heard, strict=False):
        assert after.tokens[:30] == before.tokens and len(after.tokens) == 300
    for prompt, before in zip(cases, calm, strict=False):
        again = await ask(service, prompt)
        assert again.tokens == before.tokens and again.cached == _WHOLE
    await service.engine.check()


async def stored(service: Service, prompt: Sequence[int]) -> int:
    """Tokens of a prompt that the storage could give, whether or not that is faster than computing."""
    seen = await service.engine.admin(CacheCommand(CacheAction.INSPECT, prompt=tuple(prompt)))
    return int(seen["tiers"]["storage"])


async def check_that_tiers_span_the_nodes(service: Service, cases: list[list[int]], folder: Path) -> None:
    assert len(set(nodes_of(service))) == 2
    calm = [await ask(service, prompt) for prompt in cases]
    flushed = await service.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=60))
    assert flushed["is_in_time"] and flushed["missing_pages"] == 0 and flushed["persisted_pages"] > 0
    await clear(service, "device")
    warm = [await ask(service, prompt) for prompt in cases]
    assert [(one.tokens, one.cached) for one in warm] == [(one.tokens, _WHOLE) for one in calm]
    assert (await service.engine.stats()).cached_by_tier["host"] == len(cases) * _WHOLE
    await clear(service, "device", "host")
    # A storage that one node cannot use changes nothing on the others.
    (folder / "1").write_text("in the way of the directory of node 1")
    with pytest.raises(ConfigError, match="cannot be used"):
        url = f"file://{folder}/{{node}}?size=64MiB"
        await service.engine.admin(CacheCommand(CacheAction.ATTACH, url=url))
    assert [await stored(service, prompt) for prompt in cases] == [_WHOLE] * len(cases)
    assert [(await ask(service, prompt)).tokens for prompt in cases] == [one.tokens for one in calm]


async def serve_and_lose(nodes: Nodes, model: Path, storage: str, folder: Path) -> None:
    settings = {"cp": 2, "page_size": _PAGE, "num_pages": 96, "host_memory": "32MiB", "storage": storage}
    settings |= {"write_policy": "write_back", "prefetch": "wait_complete", "prefetch_timeout_s": 10.0}
    async with serving(model, address="auto", drain_timeout_s=20.0, start_timeout_s=90.0, **settings) as service:
        await check_that_tiers_span_the_nodes(service, prompts(2, seed=1, shared=0, length=70), folder)
        cases = prompts(3, seed=2, shared=0, length=70)
        calm = [await ask(service, prompt) for prompt in cases]
        only_on_device = cases.pop()
        second = nodes_of(service)[1]
        await under_load(service, cases, calm, second, lambda node: nodes.drain(node, left_s=60))
        assert await stored(service, only_on_device) == _WHOLE, "what was saved of a node that drained"
        nodes.kill(second)
        nodes.add()
        await under_load(service, cases, calm, nodes_of(service)[0], nodes.kill)  # the engine's
        await under_load(service, cases, calm, nodes_of(service)[1], nodes.kill)
        assert len(set(nodes_of(service))) == 1, "on what is left"
        stats = await service.engine.stats()
        assert stats.engines_lost == 3 and stats.epoch > 3_000_000


def run(model: Path, folder: Path) -> None:
    nodes = Nodes()
    (folder / "files").mkdir()
    try:
        with redis_server(folder) as port:
            storage = f"redis://127.0.0.1:{port}/0?prefix=nodes"
            asyncio.run(asyncio.wait_for(serve_and_lose(nodes, model, storage, folder / "files"), 600))
    finally:
        nodes.close()


@pytest.mark.timeout(700)
@pytest.mark.long
def test_a_service_goes_on_when_nodes_drain_or_die(model: Path, tmp_path: Path) -> None:
    # In a process of its own: this one is connected to another cluster.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(run, model, tmp_path).result(650)
