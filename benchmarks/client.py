"""A client of /v1/completions that notes when each token comes, and costs the machine little beside the server."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.trace import Prompt

_LINE_LIMIT = 1 << 22  # the first event repeats the prompt's ids


@dataclass(frozen=True)
class Reply:
    """What came of one request.

    Attributes:
        start_s, token_times_s: when its bytes were ready to be sent and when each token came, on one clock.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them.
        tokens: ids of the answer; -1 where the server does not tell them, or they were not asked for.
    """

    start_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...] = ()
    output_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.token_times_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


async def complete(
    endpoint: str, prompt: Prompt, *, model: str, timeout_s: float, more: Mapping[str, Any] | None = None
) -> Reply:
    """Send token ids, greedy, and read the stream to its end.

    Args:
        endpoint: such as "http://127.0.0.1:8000".
        prompt: ids and number of tokens to generate.
        model: name that the server knows.
        timeout_s: for the whole answer.
        more: fields of the request, beyond or instead of these.
    Raises:
        RuntimeError: the server refused or broke off; the message has its words.
        TimeoutError: it took too long.
    """
    body = {
        "model": model,
        "prompt": prompt.tokens,
        "max_tokens": prompt.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # a token without text of its own has its event too
        **(more or {}),
    }
    url = urlsplit(endpoint)
    request = _request(url.netloc, body)
    start_s = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(url.hostname, url.port or 80, limit=_LINE_LIMIT)
        try:
            writer.write(request)
            return await _read(reader, start_s)
        finally:
            writer.close()


def _request(host: str, body: dict[str, object]) -> bytes:
    payload = json.dumps(body).encode("ascii")
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
        "Connection: close",
        *([f"Authorization: Bearer {key}"] if (key := os.environ.get("RAYCACHE_API_KEY")) else []),
    ]
    return "\r\n".join([*head, "", ""]).encode("ascii") + payload


async def _read(reader: asyncio.StreamReader, start_s: float) -> Reply:
    status = (await reader.readline()).decode("ascii", "replace").strip()
    if " 200 " not in f"{status} ":
        raise RuntimeError(f"{status}: {(await reader.read()).decode('utf-8', 'replace')[-500:]}")
    times: list[float] = []
    tokens: list[int] = []
    usage = None
    # Each event is sent as one chunk, so that lines which are neither headers nor sizes begin with "data: ".
    async for line in reader:
        if line.startswith(b"data: {"):
            now_s = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                # Without ids, an event with a choice is one token.
                ids = choice.get("token_ids")
                new = (-1,) if ids is None else ids
                tokens += new
                times += [now_s] * len(new)
            usage = event.get("usage") or usage
    if usage is None or not times:
        raise RuntimeError("the answer ended early")
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Reply(
        start_s, tuple(times), usage["prompt_tokens"], cached_tokens, tuple(tokens), usage["completion_tokens"]
    )


async def replay(
    endpoint: str, prompts: Sequence[Prompt], *, model: str, concurrency: int, speed: float, timeout_s: float
) -> list[Reply]:
    """Send all prompts, in order.

    Args:
        endpoint, model, timeout_s: see `complete`.
        prompts: by time.
        concurrency: requests under way at most.
        speed: 0 sends the next as soon as one of `concurrency` ends; else the times of the trace are kept, divided
            by this.
    Returns:
        One reply per prompt, in order.
    """
    slots = asyncio.Semaphore(concurrency)
    start_s = time.perf_counter()

    async def one(prompt: Prompt) -> Reply:
        try:
            return await complete(endpoint, prompt, model=model, timeout_s=timeout_s)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt in prompts:
            if speed:
                await asyncio.sleep(start_s + prompt.time_s / speed - time.perf_counter())
            await slots.acquire()
            tasks.append(group.create_task(one(prompt)))
    return [task.result() for task in tasks]
