"""A real Prometheus, for as long as a test needs it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs the programs prometheus and promtool",
)


class Prometheus:
    """One that runs."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Values now."""
        answer = (await self._client.get("/api/v1/query", params={"query": expression})).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    async def rules(self) -> list[dict[str, Any]]:
        """All rules, with what came of them."""
        answer = (await self._client.get("/api/v1/rules")).json()
        return [rule for group in answer["data"]["groups"] for rule in group["rules"]]


@asynccontextmanager
async def prometheus(settings: Path, data: Path, *, within_s: float) -> AsyncIterator[Prometheus]:
    """Start one with a file of settings, and end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = data.with_suffix(".log")
    command = [
        "prometheus",
        f"--config.file={settings}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address={address}",
    ]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as client:
            async with asyncio.timeout(within_s):
                while not await _is_ready(client):
                    assert process.poll() is None, log.read_text()
                    await asyncio.sleep(0.2)
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(20)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/-/ready")).status_code == 200
    except httpx.TransportError:
        return False
