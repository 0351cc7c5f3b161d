"""kill -9 of ranks, engine and arena owner under load: are all answers right, how long is the pause, what stays cached.

    python -m benchmarks.survival MODEL --kills 50 --tp 2 --storage file:///tmp/store?size=1GiB

Clients ask the same prompts again and again, greedy. What each prompt is answered with is noted before the first kill.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.figures import percentile, write_json
from benchmarks.server import launched, status
from benchmarks.tokens import plain_token_ids

VICTIMS = {"rank": "RankActor.", "engine": "EngineActor", "owner": "ArenaActor"}
_PAGE = 16
_TIMEOUT_S = 300.0


@dataclass
class Load:
    """Clients, and what they have seen.

    Attributes:
        endpoint, model: of the server.
        prompts: token ids.
        output_len: tokens of each answer.
        wanted: answers before the first kill.
        token_times_s: when any client got a token.
        wrong, failed, right: answers; those that failed with what was said.
        cached: (cached tokens, whole pages' tokens) of the answers that began after a kill.
    """

    endpoint: str
    model: str
    prompts: Sequence[Sequence[int]]
    output_len: int
    wanted: list[list[int]] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    wrong: int = 0
    right: int = 0
    failed: list[str] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    is_over: bool = False

    async def ask(self, client: httpx.AsyncClient, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Tokens of an answer, and cached tokens of its prompt."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": self.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens, cached = list[int](), 0
        async with client.stream("POST", f"{self.endpoint}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    tokens += choice["token_ids"]
                    self.token_times_s.append(time.monotonic())
                cached = (event["usage"] or {}).get("prompt_tokens_details", {}).get("cached_tokens", cached)
        return tokens, cached

    async def run_client(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Ask until it is over."""
        while not self.is_over:
            number = draw.randrange(len(self.prompts))
            try:
                tokens, cached = await self.ask(client, self.prompts[number])
            except (RuntimeError, httpx.HTTPError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(1)
                continue
            self.right += tokens == self.wanted[number]
            self.wrong += tokens != self.wanted[number]
            self.cached.append((cached, (len(self.prompts[number]) - 1) // _PAGE * _PAGE))

    def longest_pause_s(self, begin_s: float) -> float:
        """Between tokens of all clients together, from `begin_s` to now."""
        times = [begin_s, *(at for at in self.token_times_s if at > begin_s), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))


def main() -> int:
    options = _options()
    flags = [f"--{axis}={getattr(options, axis)}" for axis in ("tp", "pp", "cp")]
    flags += [f"--page-size={_PAGE}", f"--num-pages={options.num_pages}", f"--host-memory={options.host_memory}"]
    flags += [f"--storage={options.storage}"] if options.storage else []
    with launched(options.model, *flags) as endpoint:
        figures = asyncio.run(_run(options, endpoint))
    print(json.dumps(figures, indent=2))
    if options.json:
        write_json(options.json, figures)
    return 1 if figures["wrong"] or figures["failed"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survival", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory of a model")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument(
        "--again", type=float, default=0.25, help="share of kills followed by another while it recovers"
    )
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=60)
    for axis in ("tp", "pp", "cp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--num-pages", type=int, default=400)
    parser.add_argument("--host-memory", default="256MiB")
    parser.add_argument("--storage", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    return parser.parse_args()


async def _run(options: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    draw = random.Random(options.seed)
    ids = plain_token_ids(options.model)
    prompts = [[draw.choice(ids) for _ in range(options.prompt_len)] for _ in range(options.prompts)]
    load = Load(endpoint, status(endpoint)["model"], prompts, options.output_len)
    pauses: dict[str, list[float]] = {victim: [] for victim in (*options.victims, "two")}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
        load.wanted = [(await load.ask(client, prompt))[0] for prompt in prompts]
        clients = [asyncio.create_task(load.run_client(client, random.Random(n))) for n in range(options.clients)]
        for _ in range(options.kills):
            victim = draw.choice(options.victims)
            await asyncio.sleep(draw.uniform(0.2, 4.0))
            begin_s = last_s = time.monotonic()
            _kill(VICTIMS[victim], draw)
            if draw.random() < options.again:
                await asyncio.sleep(draw.uniform(0.0, 4.0))
                last_s, victim = time.monotonic(), "two"
                _kill(VICTIMS[draw.choice(options.victims)], draw)
            await _until_served_again(load, last_s)
            pauses[victim].append(load.longest_pause_s(begin_s))
            print(f"{victim:8} {pauses[victim][-1]:6.2f} s", file=sys.stderr, flush=True)
        load.is_over = True
        await asyncio.gather(*clients)
    return _figures(load, pauses, after=status(endpoint))


def _kill(name: str, draw: random.Random) -> None:
    """One of the actors of that name; none where all of them are being started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if name in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    if found:
        draw.choice(found).kill()


async def _until_served_again(load: Load, begin_s: float) -> None:
    """Until tokens come that were sent after the kill was noticed: those on their way then come within a moment."""
    while not load.token_times_s or load.token_times_s[-1] < begin_s + 1.0:
        await asyncio.sleep(0.05)
        if time.monotonic() > begin_s + _TIMEOUT_S:
            raise TimeoutError(f"no token within {_TIMEOUT_S:.0f} s of a kill")


def _figures(load: Load, pauses: dict[str, list[float]], *, after: dict[str, Any]) -> dict[str, Any]:
    return {
        "right": load.right,
        "wrong": load.wrong,
        "failed": load.failed,
        "kills": {victim: len(times) for victim, times in pauses.items()},
        "pause_s_p50": {victim: percentile(times, 50) for victim, times in pauses.items()},
        "pause_s_max": {victim: max(times, default=0.0) for victim, times in pauses.items()},
        "cached_share": sum(cached for cached, _ in load.cached) / max(1, sum(whole for _, whole in load.cached)),
        "cached_by_tier": after["cached_by_tier"],
        "misses": after["misses"],
    }


if __name__ == "__main__":
    sys.exit(main())
