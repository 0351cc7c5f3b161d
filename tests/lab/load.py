"""Steady load, run in a lab: python -m tests.lab.load ENDPOINT WORK.json, until its input ends.

WORK.json has prompts (lists of tokens), count (tokens of an answer), clients, deadline_s and pause_s.
Each client asks for one prompt after the other, as a stream, and prints a line of JSON for each: see `Answer`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx


@dataclass
class Answer:
    """What one request came to.

    Attributes:
        prompt: its number.
        begin_s, end_s: on the machine's monotonic clock.
        tokens: that came.
        stamps_s: when each piece of them came.
        cached: tokens of the prompt per tier.
        error: why it ended without its last token; empty when it did not.
    """

    prompt: int
    begin_s: float
    end_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    stamps_s: list[float] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    error: str = ""


async def main() -> None:
    endpoint, path = sys.argv[1:]
    work = json.loads(Path(path).read_text(encoding="utf-8"))
    headers = {"Authorization": f"Bearer {os.environ.get('RAYCACHE_API_KEY', 'none')}"}
    options: dict[str, Any] = {
        "timeout": httpx.Timeout(work["deadline_s"], connect=10.0),
        # A server closes connections that have been idle, and a request on one of these would count as failed.
        "limits": httpx.Limits(max_keepalive_connections=0),
    }
    async with httpx.AsyncClient(base_url=endpoint, headers=headers, trust_env=False, **options) as client:
        tasks = [asyncio.create_task(_client(client, number, work)) for number in range(work["clients"])]
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _client(client: httpx.AsyncClient, number: int, work: dict[str, Any]) -> None:
    prompts = work["prompts"]
    turn = number * len(prompts) // work["clients"]
    while True:
        answer = Answer(turn % len(prompts), time.monotonic())
        try:
            async with asyncio.timeout(work["deadline_s"]):
                await _ask(client, prompts[answer.prompt], work["count"], answer)
        except TimeoutError:
            answer.error = "hangs"
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.end_s = time.monotonic()
        print(json.dumps(asdict(answer)), flush=True)
        turn += 1
        await asyncio.sleep(1.0 if answer.error else work["pause_s"])


async def _ask(client: httpx.AsyncClient, prompt: list[int], count: int, answer: Answer) -> None:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = f"HTTP {response.status_code}: {(await response.aread())[:200].decode()}"
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(json.loads(line[6:]), answer)
    if not answer.error and len(answer.tokens) != count:
        answer.error = f"ended after {len(answer.tokens)} tokens"


def _take(chunk: dict[str, Any], answer: Answer) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"].get("message", chunk["error"]))
    for choice in chunk.get("choices", ()):
        if tokens := choice.get("token_ids"):
            answer.tokens += tokens
            answer.stamps_s.append(time.monotonic())
    if usage := chunk.get("usage"):
        answer.cached = usage["prompt_tokens_details"]["cached_tokens_by_tier"]


if __name__ == "__main__":
    asyncio.run(main())
