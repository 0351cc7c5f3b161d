"""A whole server without Ray: the engine of an `LLM` behind the HTTP API, in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.http.app import build_app
from launch.http.bind import bind
from launch.http.serve import serve
from raycache import LLM
from raycache.config import Config
from raycache.types import CacheCommand, EngineInfo, EngineStats, GenerateRequest, RequestOutput, StreamState


class SteppedEngine:
    """The engine of an `LLM` as an `AsyncEngine`, stepped in the event loop."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._queues: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def info(self) -> EngineInfo:
        return self._llm.info

    async def stats(self) -> EngineStats:
        return self._llm.stats()

    async def stream_states(self, request_ids: Sequence[str]) -> Mapping[str, StreamState]:
        return self._llm.engine.stream_states(request_ids)

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        return self._llm.cache(command)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._llm.engine.add(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            while True:
                output = await queue.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._queues[request.request_id]
            self._llm.engine.cancel(request.request_id)

    async def _step(self) -> None:
        while self._llm.engine.has_work:
            for output in self._llm.engine.step():
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)
            await asyncio.sleep(0)


@contextmanager
def served(model: Path, **settings: Any) -> Iterator[str]:
    """A server in another thread; gives its URL. Its ranks are processes, if there are several."""
    started, stopping = threading.Event(), threading.Event()
    url = ""

    async def run(llm: LLM, sock: socket.socket, config: Config) -> None:
        nonlocal url
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        app = build_app(SteppedEngine(llm), config=config, info=llm.info, tokenizer=llm.tokenizer)

        def tell(endpoint: str) -> None:
            nonlocal url
            url = endpoint
            started.set()
            threading.Thread(target=lambda: (stopping.wait(), loop.call_soon_threadsafe(stop.set))).start()

        await serve(app, sock=sock, stop=stop, on_started=tell, config=config, grace_s=1.0)

    config = Config(model=str(model), port="auto")
    with LLM(str(model), device="cpu", **settings) as llm:
        thread = threading.Thread(target=lambda: asyncio.run(run(llm, bind(config), config)))
        thread.start()
        try:
            assert started.wait(60)
            yield url
        finally:
            stopping.set()
            thread.join()
        llm.check()
