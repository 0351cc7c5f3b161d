"""Thousands of clients that behave badly, and one that does not, whose requests are timed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil

from tests.security.raw import post
from tests.unit.scripted import TEXT

_BACK_AFTER_S = 5.0
"""A bad client that was thrown out comes again; sooner, and the test would measure its own clients."""
_LONG = {"model": "tiny", "prompt": "x", "max_tokens": 190, "ignore_eos": True, "stream": True, "logprobs": 20}


@dataclass
class Outcome:
    """What the good client saw while the others were there.

    Attributes:
        held: connections of the bad ones, most at a time.
        opened: by the bad ones in all.
        seconds: of each request of the good one that was served.
        failures: of the others, as text.
        memory: resident bytes of the server before, and at most.
        files: descriptors of the server, at most.
    """

    held: int = 0
    opened: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)
    files: int = 0

    def __str__(self) -> str:
        times = sorted(self.seconds) or [float("nan")]
        p50, p99 = statistics.median(times), times[min(len(times) - 1, int(0.99 * len(times)))]
        grown = (self.memory[1] - self.memory[0]) / 2**20
        return (
            f"{self.held:,} at a time, {self.opened:,} opened; good client: {len(self.seconds)} served, "
            f"{len(self.failures)} failed, p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms; server: {self.files} files, "
            f"+{grown:.0f} MiB from {self.memory[0] / 2**20:.0f}"
        )


@dataclass(frozen=True)
class Behaviour:
    """How a bad client behaves: what it says first, what every two seconds after that, and whether it ever reads."""

    name: str
    first: bytes
    then: bytes = b""
    reads: bool = True


BEHAVIOURS = (
    Behaviour("says nothing", b""),
    Behaviour("slow headers", b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
    Behaviour("slow body", post(_LONG)[:-200], b" "),
    Behaviour("never reads its streams", post(_LONG) * 20, reads=False),
)


async def attack(behaviour: Behaviour, *, count: int, seconds: float, settings: dict[str, Any]) -> Outcome:
    """Let `count` bad clients loose on a server of its own, each coming back when it is thrown out."""
    async with _server(settings) as (endpoint, process):
        outcome = Outcome(memory=(process.memory_info().rss, 0))
        open_now: set[asyncio.StreamWriter] = set()
        bad = [asyncio.create_task(_bad(endpoint, behaviour, open_now, outcome)) for _ in range(count)]
        watching = asyncio.create_task(_watch(process, open_now, outcome))
        try:
            async with asyncio.timeout(180):
                while outcome.opened < count:
                    await asyncio.sleep(0.1)
            # In a process of its own: in this one it would wait for the bad clients' turns.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                loop = asyncio.get_running_loop()
                outcome.seconds, outcome.failures = await loop.run_in_executor(pool, good, endpoint, seconds)
        finally:
            for task in (*bad, watching):
                task.cancel()
            await asyncio.gather(*bad, watching, return_exceptions=True)
        return outcome


@asynccontextmanager
async def _server(settings: dict[str, Any]) -> AsyncIterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "tests.security.scripted_server", json.dumps(settings)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdin is not None and started.stdout is not None
    try:
        yield (await asyncio.to_thread(started.stdout.readline)).strip(), psutil.Process(started.pid)
        assert started.poll() is None, "the server ended"
    finally:
        started.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(started.wait, 30)
        started.kill()


async def _bad(endpoint: str, behaviour: Behaviour, open_now: set[asyncio.StreamWriter], outcome: Outcome) -> None:
    url = urlsplit(endpoint)
    while True:
        try:
            _, writer = await asyncio.open_connection(url.hostname, url.port)
        except OSError:
            await asyncio.sleep(1.0)
            continue
        open_now.add(writer)
        outcome.opened += 1
        try:
            if not behaviour.reads:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(behaviour.first)
            while not writer.transport.is_closing():
                await asyncio.sleep(2.0)
                writer.write(behaviour.then)
        finally:
            open_now.discard(writer)
            writer.transport.abort()
        await asyncio.sleep(_BACK_AFTER_S)


def good(endpoint: str, seconds: float) -> tuple[list[float], list[str]]:
    """Ask, over a connection that is kept and over new ones; seconds of what was served, and why the rest was not."""
    outcome = Outcome()
    asyncio.run(_good(endpoint, outcome, seconds=seconds))
    return outcome.seconds, outcome.failures


async def _good(endpoint: str, outcome: Outcome, *, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    async with openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0, timeout=20) as kept:
        while time.monotonic() < end_s:
            await _timed(lambda: _ask(kept), outcome)
            async with openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0, timeout=20) as new:
                await _timed(lambda client=new: _ask(client), outcome)  # type: ignore[misc]
            await asyncio.sleep(0.1)


async def _ask(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def _timed(ask: Callable[[], Awaitable[None]], outcome: Outcome) -> None:
    began_s = time.monotonic()
    try:
        await ask()
        outcome.seconds.append(time.monotonic() - began_s)
    except openai.APIError as error:
        outcome.failures.append(str(error))


async def _watch(process: psutil.Process, open_now: set[asyncio.StreamWriter], outcome: Outcome) -> None:
    while True:
        outcome.held = max(outcome.held, len(open_now))
        outcome.memory = (outcome.memory[0], max(outcome.memory[1], process.memory_info().rss))
        outcome.files = max(outcome.files, process.num_fds())
        await asyncio.sleep(0.25)
