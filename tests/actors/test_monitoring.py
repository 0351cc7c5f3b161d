"""What a Prometheus that reads Ray's metrics, and one that reads the server's own, knows of a service that runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import ray
import yaml

from actors.cluster import Cluster
from actors.metrics import publishing
from launch.dashboards.alerts import ALERTS
from launch.dashboards.files import write
from tests.actors.prometheus import Prometheus, needs_prometheus, prometheus
from tests.actors.serving import Service, serving
from tests.actors.test_service import complete, prompts

_PAGE = 16
_WITHIN_S = 120.0


def settings_of(folder: Path, session: Path, endpoint: str) -> tuple[Path, list[str]]:
    """Prometheus settings for both sources, and the expressions of all panels of both dashboards."""
    expressions: list[str] = []
    jobs, rules = [], []
    for source in ("ray", "server"):
        servers = () if source == "ray" else (urlsplit(endpoint).netloc,)
        root = session / "metrics" if source == "ray" else folder / source
        board, rule, settings = write(root, servers=servers)
        found = yaml.safe_load(settings.read_text())
        jobs += found["scrape_configs"]
        rules.append(str(rule))
        panels = json.loads(board.read_text())["panels"]
        expressions += [target["expr"] for panel in panels for target in panel.get("targets", ())]
    path = folder / "prometheus.yml"
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    path.write_text(yaml.safe_dump({"global": every, "rule_files": rules, "scrape_configs": jobs}))
    return path, expressions


def discover(session: Path) -> None:
    """What Ray's dashboard writes, which this cluster has not: the addresses of its agents."""
    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    path = session / "prom_metrics_service_discovery.json"
    path.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": targets}]))


def chosen(expression: str) -> str:
    """As Grafana sends it, with all models and replicas chosen."""
    for name, value in (("$model", ".*"), ("$replica", ".*"), ("$__rate_interval", "1m")):
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


async def until_all_have_values(server: Prometheus, expressions: Sequence[str]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    empty = list(expressions)
    while empty:
        assert time.monotonic() < deadline, f"without values: {empty}"
        empty = [expression for expression in empty if not await server.query(chosen(expression))]
        await asyncio.sleep(1)


async def work(service: Service) -> None:
    """Prompts with a prefix in common, one after another, so that each finds what the one before has left."""
    for prompt in prompts(4, shared=4 * _PAGE, length=20):
        await complete(service, prompt, 6)


@needs_prometheus
@pytest.mark.long
def test_every_panel_has_values_and_no_alert_fires(cluster: Cluster, model: Path, scratch: Path) -> None:
    assert cluster.temp_dir is not None
    session = cluster.temp_dir / "session_latest"

    async def run() -> None:
        tiers = {"host_memory": "16MiB", "storage": f"file://{scratch}/store?size=64MiB"}
        async with serving(model, page_size=_PAGE, num_pages=64, log_format="json", **tiers) as service:
            discover(session)
            path, expressions = settings_of(scratch, session, service.endpoint)
            assert len(expressions) > 80
            async with (
                publishing(service.engine, service.observed.metrics, every_s=0.5),
                prometheus(path, scratch / "data", within_s=60) as server,
            ):
                # What has no value before it counts is seen from 0 on.
                await until_all_have_values(server, ["raycache_ready == 1", "ray_raycache_ready == 1"])
                worker = asyncio.create_task(forever(service))
                try:
                    await until_all_have_values(server, expressions)
                finally:
                    worker.cancel()
                await agree(server, "prompt_tokens_total")
                await moves_are_told(service)
                actors_tell_who_they_are(session / "logs")
                rules = await server.rules()
                assert len(rules) == 2 * len(ALERTS)
                assert [rule["name"] for rule in rules if rule["health"] != "ok" or rule["state"] == "firing"] == []

    asyncio.run(run())


def actors_tell_who_they_are(logs: Path) -> None:
    """Each line of theirs says which replica, epoch and rank it is of; Ray's own lines are between them."""
    found = [line for path in logs.glob("worker-*.err") for line in path.read_text().splitlines()]
    lines = [json.loads(line) for line in found if line.startswith("{")]
    told = {line["message"]: line for line in lines if line["logger"].startswith("actors.")}
    assert told["epoch 1 runs on 1 ranks"].items() >= {"epoch": 1, "replica": "0", "level": "info"}.items()
    assert told["rank 0 is ready for plans"].items() >= {"epoch": 1, "replica": "0", "rank": 0}.items()
    assert any("rank 0 (pp=0 cp=0 tp=0), replica 0, epoch 1" in line for line in found)  # as Ray shows it


async def moves_are_told(service: Service) -> None:
    """Bytes as the sizes of the pages say, and times."""
    stats = await service.engine.stats()
    host, storage = stats.tiers["host"], stats.tiers["storage"]
    page_bytes = service.info.tiers["host"]["components"]["full"] / host["pages_total"]
    assert host["saved_bytes"] == host["saved_pages"] * page_bytes > 0
    assert storage["persisted_bytes"] == storage["persisted_pages"] * page_bytes > 0
    assert host["save_s"] > 0 and storage["persist_s"] > 0
    assert stats.components["host"]["full"] == (host["pages_total"], host["pages_free"])
    assert stats.epoch == 1 and stats.rebuilds == 0


async def forever(service: Service) -> None:
    while True:
        await work(service)
        await asyncio.sleep(0.5)


async def agree(server: Prometheus, name: str) -> None:
    """Ray's metrics end where the server's own do."""
    deadline = time.monotonic() + _WITHIN_S
    while True:
        (own,), (rays,) = await server.query(f"sum(raycache_{name})"), await server.query(f"sum(ray_raycache_{name})")
        if own["value"][1] == rays["value"][1]:
            return
        assert time.monotonic() < deadline, f"{own} {rays}"
        await asyncio.sleep(1)
