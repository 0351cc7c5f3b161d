"""A simulated server whose log-probabilities have modelled noise, cheap enough for hundreds of runs.

No model computes anything: the log-probabilities of the next token are drawn from a hash of the text before it, and
what rounding would add is drawn on top, another amount for prompts that are alone, in a batch, or partly cached.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2

_CHARS = 4  # of a token
_PAGE = 16 * _CHARS
_WORDS = ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx")

Draw = Callable[[random.Random], float]

NOISES: dict[str, Draw] = {
    "none": lambda draw: 0.0,
    "normal": lambda draw: draw.gauss(0, 1),
    "double exponential": lambda draw: draw.expovariate(1) * draw.choice((-1, 1)),
    "one size per request": lambda draw: draw.gauss(0, 1),
    "rare": lambda draw: draw.gauss(0, 1) if draw.random() < 0.02 else 0.0,
}
"""Of one logit, before it is multiplied by the size of the noise."""


@dataclass(frozen=True)
class Rounding:
    """What a server rounds.

    Attributes:
        step: logits are multiples of it, as in bfloat16; 0: they are not.
        decimals: of the log-probabilities that it shows.
    """

    step: float = 0.0
    decimals: int = 17


class NoisyServer(httpx2.AsyncBaseTransport):
    """Answers /v1/completions.

    Args:
        noise: a key of `NOISES`.
        alone, batched, cached: size of the noise, nats.
        rounding: of logits, and of what it shows.
        shift: what a fault adds to the best logit of an answer from the cache; 0: it is right.
        share: of answers from the cache that have the fault.
    """

    def __init__(
        self,
        seed: int,
        *,
        noise: str = "normal",
        alone: float = 0.0,
        batched: float = 0.02,
        cached: float = 0.02,
        rounding: Rounding | None = None,
        shift: float = 0.0,
        share: float = 1.0,
    ) -> None:
        self._random = random.Random(seed)
        self._draw, self._is_per_request = NOISES[noise], noise == "one size per request"
        self._sizes = {"alone": alone, "batched": batched, "cached": cached}
        self._rounding, self._shift, self._share = rounding or Rounding(), shift, share
        self._pages: set[tuple[str, int]] = set()
        self._running = self._most = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        match request.url.path:
            case "/v1/models":
                return httpx2.Response(200, json={"data": [{"id": "noisy"}]})
            case "/v1/completions":
                body = json.loads(await request.aread())
            case _:
                return httpx2.Response(404, json={"error": {"message": "not found"}})
        if "cachecheck_unknown_field" in body:
            return httpx2.Response(400, json={"error": {"message": "unknown field"}})
        self._running += 1
        await asyncio.sleep(0)
        self._most = max(self._most, self._running)
        await asyncio.sleep(0)
        found = self._answer(body, is_alone=self._most == 1)
        self._running -= 1
        self._most = min(self._most, self._running and self._most)
        if body.get("stream"):
            return httpx2.Response(200, text=f"data: {json.dumps(found)}\n\n" * 4)
        return httpx2.Response(200, json=found)

    def _answer(self, body: dict[str, Any], *, is_alone: bool) -> dict[str, Any]:
        text, salt = body["prompt"], body.get("cache_salt", "")
        keys = [(salt, zlib.crc32(text[:end].encode())) for end in range(_PAGE, len(text), _PAGE)]
        hit = next((count for count, key in enumerate(keys) if key not in self._pages), len(keys))
        self._pages.update(keys)
        sizes = [self._sizes["alone" if is_alone else "batched"], self._sizes["cached"] if hit else 0.0]
        size = max(sizes) * (math.exp(self._random.gauss(0, 0.5)) if self._is_per_request else 1.0)
        shift = self._shift if hit and self._random.random() < self._share else 0.0
        names, values, tops = [], [], []
        for _ in range(body["max_tokens"]):
            logprobs = self._logprobs(text, size, shift)
            best = max(logprobs, key=lambda name: logprobs[name])
            text += best
            names.append(best)
            values.append(logprobs[best])
            tops.append(dict(sorted(logprobs.items(), key=lambda one: -one[1])[:5]))
        logprobs_field = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
        length = -(-len(body["prompt"]) // _CHARS)
        usage = {"prompt_tokens": length, "prompt_tokens_details": {"cached_tokens": hit * _PAGE // _CHARS}}
        return {"choices": [{"text": "".join(names), "logprobs": logprobs_field}], "usage": usage}

    def _logprobs(self, text: str, size: float, shift: float) -> dict[str, float]:
        true, draw = random.Random(zlib.crc32(text.encode())), self._random
        logits = [true.gauss(12, 2) for _ in _WORDS]
        logits[0] += shift
        logits = [logit + size * self._draw(draw) for logit in logits] if size else logits
        if step := self._rounding.step:
            logits = [round(logit / step) * step for logit in logits]
        total = math.log(sum(map(math.exp, logits)))
        return {name: round(logit - total, self._rounding.decimals) for name, logit in zip(_WORDS, logits, strict=True)}
