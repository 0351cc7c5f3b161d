"""`raycache cachecheck` against RayCache itself: tiny models of several kinds of state, all tiers, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.cli.main import main
from launch.http.app import build_app
from launch.http.serve import bind, serve
from raycache import LLM
from raycache.cachecheck.client import Client, Connection
from raycache.config import Config
from raycache.types import CacheCommand, EngineInfo, EngineStats, GenerateRequest, RequestOutput, StreamState
from tests.oracle import tiny_tokenizers
from tests.oracle.families import make_family


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
    """A server in another thread; gives its URL."""
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


async def flush(url: str) -> bool:
    client = Client(Connection(url), budget=0)
    try:
        return await client.command("/cache/clear")
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"host_memory": "64MiB", "num_pages": 120}),  # long prompts leave device memory
        pytest.param("gemma3", {"draft": "ngram"}, marks=pytest.mark.long),
        pytest.param("qwen3_next", {"host_memory": "64MiB", "num_pages": 200}, marks=pytest.mark.long),
    ],
)
def test_no_fault_is_found_in_raycache(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, Any],
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for addresses of this machine
    model = make_family(tmp_path / "model", family, vocab_size=400)
    tiny_tokenizers.byte_level(model)
    page = tmp_path / "report.html"
    with served(model, page_size=16, **{"num_pages": 400, **settings}) as url:
        flags = ["--prompt-tokens", "60", "--budget-requests", "120", "--seed", "3", "--json", "--html", str(page)]
        code = main(["cachecheck", url, *flags])
        assert asyncio.run(flush(url))
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found["verdict"]
    rows = found["scenarios"]
    assert found["target"]["cold"] == "salt" and found["target"]["shows_cached"]
    assert all(rows[name]["hits"] for name in ("repeated", "branched", "grown", "tools", "cut", "load"))
    assert found["target"]["has_drafts"] == ("draft" in settings)
    assert "</html>" in page.read_text()
