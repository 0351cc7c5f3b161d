"""A service whose ranks, boards and arenas are on two Ray nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private import state

from actors.cluster import Cluster
from raycache.types import CacheAction, CacheCommand, GenerateRequest, SamplingParams
from tests.actors.serving import Service, serving
from tests.oracle.golden import greedy

_PAGE = 16
_PROMPT = [3 + 7 * i % 250 for i in range(6 * _PAGE + 5)]
_WHOLE = 6 * _PAGE
_NUM_TOKENS = 12


@pytest.fixture
def second_node(cluster: Cluster, tmp_path: Path) -> Iterator[str]:
    """Id of another Ray node, which is on this machine, too."""
    before = {node["NodeID"] for node in ray.nodes()}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--address", cluster.address, "--num-cpus", "4", "--object-store-memory", str(100 << 20)]

    def others() -> list[str]:
        return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in before]

    log = tmp_path / "ray-start.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while not others() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        assert others(), log.read_text()
        yield others()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        deadline = time.monotonic() + 60
        while others() and time.monotonic() < deadline:
            time.sleep(0.2)


async def ask(service: Service, name: str) -> tuple[list[int], dict[str, int]]:
    """The tokens after the prompt, and where its prefix came from."""
    sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    outputs = [output async for output in service.engine.generate(GenerateRequest(name, _PROMPT, sampling))]
    return [token for output in outputs for token in output.token_ids], dict(outputs[0].cached_by_tier)


async def clear(service: Service, *tiers: str) -> None:
    """Forget what tiers hold, once no page is on its way: those are kept."""
    while (stats := await service.engine.stats()).pages_locked or stats.tiers["storage"]["open_requests"]:
        await asyncio.sleep(0.05)
    await service.engine.admin(CacheCommand(CacheAction.CLEAR, tiers=tiers))


def kill_a_rank(node: str) -> None:
    """kill -9 of a rank on a node."""
    actors = [actor for actor in state.actors().values() if actor["State"] == "ALIVE"]
    ranks = [a["Pid"] for a in actors if a["ActorClassName"] == "RankActor" and a["Address"]["NodeID"] == node]
    os.kill(ranks[-1], signal.SIGKILL)


@pytest.mark.long
def test_ranks_on_two_nodes_serve_from_every_tier_and_outlive_a_lost_rank(
    cluster: Cluster, second_node: str, model: Path, tmp_path: Path
) -> None:
    expected = greedy(model, _PROMPT, _NUM_TOKENS)
    first_node = ray.get_runtime_context().get_node_id()
    store = tmp_path / "store"
    store.mkdir()

    async def run() -> None:
        settings = {
            "placement": f"0-1@{first_node};2-3@{second_node}",
            "host_memory": "16MiB",
            "storage": f"file://{store}/{{node}}?size=32MiB",
            "prefetch": "wait_complete",
            "prefetch_timeout_s": 20.0,
        }
        async with serving(model, tp=2, cp=2, page_size=_PAGE, num_pages=64, **settings) as service:
            assert await ask(service, "cold") == (expected, {})
            assert await ask(service, "device") == (expected, {"device": _WHOLE})
            await clear(service, "device")
            assert await ask(service, "host") == (expected, {"host": _WHOLE})
            await clear(service, "device", "host")
            assert await ask(service, "storage") == (expected, {"storage": _WHOLE})
            assert all(any((store / node).glob("*.segment")) for node in "01"), "each node has stored its part"
            # A rank of the far node dies: the next gang finds both arenas as they were.
            kill_a_rank(second_node)
            assert (await ask(service, "lost"))[0] == expected
            await clear(service, "device")
            assert await ask(service, "after") == (expected, {"host": _WHOLE})
            await service.engine.check()

    asyncio.run(asyncio.wait_for(run(), 500))
