"""The same service behind Ray Serve: streams, cancels, orders, and the application that Serve builds of settings."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from ray.serve import Application

from actors.cluster import Cluster
from actors.ingress import ServedIngress
from launch.ray_serve import app, build
from raycache.config import Config
from raycache.errors import ConfigError
from tests.actors.test_service import greedy, prompts

_PAGE = 16


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def start(client: openai.AsyncOpenAI, prompt: list[int], count: int) -> openai.AsyncStream[Completion]:
    """Ask for `count` tokens; returns once the first is there."""
    return await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=count,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


async def rest(stream: openai.AsyncStream[Completion]) -> list[int]:
    return [
        token
        async for chunk in stream
        for choice in chunk.choices
        for token in choice.model_dump().get("token_ids") or []
    ]


async def until(http: httpx.AsyncClient, holds: Callable[[dict[str, Any]], bool], *, num_whole: int) -> None:
    """Wait for figures of /status, as long as no more than `num_whole` requests have run to their end."""
    begin = time.monotonic()
    while not holds(figures := (await http.get("/status")).json()):
        seen = f"running {figures['running']}, finished {figures['finished']}, pages {figures['pages_in_use']}"
        assert figures["finished"].get("length", 0) <= num_whole, f"a request that was to be cancelled ended: {seen}"
        assert time.monotonic() - begin < 60, f"nothing happens: {seen}"
        await asyncio.sleep(0.05)


async def use(endpoint: str, wanted: list[list[int]], cases: list[list[int]]) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0, timeout=120) as client,
        httpx.AsyncClient(base_url=endpoint, timeout=60) as http,
    ):
        # A client that goes away ends its own request in the engine, and no other: not even if it was the first one.
        streams = [await start(client, prompt, 1900) for prompt in cases]
        last = await start(client, cases[0], 400)
        for stream in streams:
            await stream.close()
        assert len(await rest(last)) == 400
        await until(http, lambda figures: figures["finished"].get("cancelled") == 4, num_whole=1)

        together = await asyncio.gather(*(start(client, prompt, 12) for prompt in cases))
        assert await asyncio.gather(*map(rest, together)) == wanted

        # The same without a stream.
        body = {"model": "tiny", "prompt": cases[1], "max_tokens": 1900, "ignore_eos": True}
        whole = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(http, lambda figures: figures["running"] == 1, num_whole=5)
        whole.cancel()
        cancelled = {"length": 5, "cancelled": 5}
        await until(http, lambda figures: figures["finished"] == cancelled and not figures["pages_in_use"], num_whole=5)

        # What the engine and the application refuse has its status here, too.
        refused = await http.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 4000, "max_tokens": 5})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        rows = (await http.get("/replicas")).json()["replicas"]
        assert [(row["name"], row["state"]) for row in rows] == [("0", "serving")]
        cleared = await http.post("/cache/clear", json={"tiers": ["device"]})
        assert cleared.json()["cleared_pages"]["device"] > 0, cleared.text


@pytest.mark.long
def test_streams_and_cancels_through_two_processes_of_serve(cluster: Cluster, model: Path) -> None:
    cases = prompts(4, shared=40, length=20)
    wanted = [greedy(model, prompt, 12) for prompt in cases]
    settings = {"page_size": _PAGE, "num_pages": 512, "rank_timeout_s": 60.0}
    config = Config(model=str(model), device="cpu", ingress="serve", num_ingress="2", **settings)  # type: ignore[arg-type]
    port = free_port()
    ingress = ServedIngress(config, build=build, port=port)
    try:
        assert ingress.info.page_size == _PAGE
        with pytest.raises(ConfigError, match="runs on the cluster"):
            ServedIngress(config, build=build, port=free_port())
        asyncio.run(asyncio.wait_for(use(f"http://127.0.0.1:{port}", wanted, cases), 150))
    finally:
        ingress.stop()


def test_serve_builds_the_application_of_a_file_and_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: /models/tiny\ncp: 2\n", encoding="utf-8")
    assert isinstance(app({"config": str(file), "cp": 4, "num_ingress": "1-3"}), Application)
    with pytest.raises(ConfigError, match="unknown setting"):
        app({"config": str(file), "cq": 4})
    with pytest.raises(ConfigError, match="cannot read the settings"):
        app({"config": str(tmp_path / "missing.yaml")})
    assert "RAYCACHE_API_KEY" in caplog.text

    built: list[Config] = []
    monkeypatch.setattr("launch.ray_serve.application", lambda config, *, build: built.append(config))
    monkeypatch.setenv("RAYCACHE_API_KEY", "secret")
    monkeypatch.setenv("RAYCACHE_STORAGE", "redis://h:1/0")
    caplog.clear()
    app({"config": str(file), "host_memory": "1GiB"})
    app({"config": str(file), "host_memory": "1GiB", "storage": "redis://other:1/0"})
    assert [(one.api_key, one.storage) for one in built] == [
        ("secret", "redis://h:1/0"),
        ("secret", "redis://other:1/0"),
    ]
    assert not caplog.text
