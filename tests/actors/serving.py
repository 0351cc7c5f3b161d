"""A whole service in the test's process: ranks and engine as actors, the HTTP server on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from actors.front import RayEngine
from actors.placement import reserve
from launch.http.app import build_app
from launch.http.bind import bind
from launch.http.serve import serve
from launch.observe.requests import Observed
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.observe.metrics import Metrics
from raycache.types import EngineInfo


@dataclass
class Service:
    """A service that runs."""

    engine: RayEngine
    info: EngineInfo
    client: openai.AsyncOpenAI
    endpoint: str
    observed: Observed


@asynccontextmanager
async def serving(model: Path, **settings: Any) -> AsyncIterator[Service]:
    """Start a service, and end it with nothing left."""
    config = Config(**{"model": str(model), "device": "cpu", "port": "auto", "rank_timeout_s": 60, **settings})
    placement = reserve(config, device=config.device, on_wait=lambda missing: None)
    engine = RayEngine(config, device=config.device, placement=placement)
    try:
        info = engine.wait_ready(timeout_s=300, on_progress=lambda phase, share: None)
        observed = Observed(Metrics(info.model))
        app = build_app(engine, config=config, info=info, tokenizer=Tokenizer(model), observed=observed)
        stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(app, sock=bind(config), stop=stop, on_started=started.set_result, config=config)
        )
        endpoint = await started
        async with openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0) as client:
            yield Service(engine, info, client, endpoint, observed)
        stop.set()
        await task
    finally:
        engine.stop()
