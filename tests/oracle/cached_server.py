"""A small real server: a transformer in numpy with a prefix cache behind the OpenAI API, and faults to plant in it.

Three layers: full attention, attention within a window, and a linear recurrence with decay, all with rotary positions
where they have any. The cache has pages of tokens for the first two and a state of the third at the end of each page (a
restore point). Without a fault, an answer from the cache is the answer without, up to the rounding of float32.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import re
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Array = NDArray[np.float32]

PAGE, WINDOW, DECAY = 16, 20, 0.97
HEADS, SIZE = 2, 16
WIDTH = HEADS * SIZE
_TOP = 5
_WORDS = [
    *re.findall(
        r"\S+",
        "amber blue coral dark early faint green hazel ivory jade late mauve adder bear crane deer eagle falcon "
        "goose heron ibex jay lynx otter Accra Bergen Cusco Delhi Evora Fez Ghent Hanoi Izmir Jaffa Kyoto Lima "
        "keeps in the Record Copy of record is topic same ",
    )
]
_PIECES = [*(f" {word}" for word in _WORDS), *(chr(code) for code in range(32, 127)), "\n", "Record "]
_SPLIT = re.compile("|".join(map(re.escape, sorted(_PIECES, key=len, reverse=True))))
_IDS = {piece: number for number, piece in enumerate(_PIECES)}


class Planted(enum.StrEnum):
    """What is wrong with a server."""

    STALE_PAGE = "stale page"
    OTHER_RESTORE_POINT = "state of another restore point"
    WINDOW_OFF_BY_ONE = "window off by one"
    WRONG_POSITION = "wrong position"
    DROPPED_TOOLS = "dropped tool text"
    OTHER_TENANT = "cross-tenant hit"
    CLAIMS_COMPUTED = "cached tokens that were computed"
    CLAIMS_TOO_MANY = "more cached tokens than were sent"
    LATER_TOKENS = "first token right and later ones wrong"
    ONE_IN_FIFTY = "one in fifty"
    UNDER_LOAD = "only under load"


@dataclasses.dataclass
class Past:
    """What a sequence remembers: keys and values [layer][H, T, S], and the recurrent state [H, S, S].

    Attributes:
        states: number of tokens -> state behind them, at the ends of pages.
    """

    keys: list[Array]
    values: list[Array]
    state: Array
    states: dict[int, Array] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]


def empty() -> Past:
    none = np.zeros((HEADS, 0, SIZE), np.float32)
    return Past([none, none], [none, none], np.zeros((HEADS, SIZE, SIZE), np.float32))


class Model:
    """Random weights, large enough that every layer changes the answer."""

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)

        def weight(*shape: int) -> Array:
            return (draw.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)

        self._embed = draw.standard_normal((len(_PIECES), WIDTH)).astype(np.float32)
        self._in = [weight(WIDTH, 3 * WIDTH) for _ in range(3)]
        self._out = [2 * weight(WIDTH, WIDTH) for _ in range(3)]
        self._head = 3 * weight(WIDTH, len(_WORDS))  # only words are written: their text is read as the same tokens

    def run(self, ids: list[int], past: Past, *, offset: int = 0, window: int = WINDOW) -> Array:
        """Compute tokens behind a past, which grows; returns log-probabilities of the words behind the last one."""
        start, count = past.length, len(ids)
        places = np.arange(start + offset, start + offset + count)
        x = self._embed[ids]
        distance = np.arange(start, start + count)[:, None] - np.arange(start + count)[None]
        for layer in range(3):
            qkv = (_norm(x) @ self._in[layer]).reshape(count, 3, HEADS, SIZE)
            q, k, v = (qkv[:, part].swapaxes(0, 1) for part in range(3))
            if layer == 2:
                found = self._recur(q, k, v, past, start=start)
            else:
                past.keys[layer] = np.concatenate([past.keys[layer], _turn(k, places)], axis=1)
                past.values[layer] = np.concatenate([past.values[layer], v], axis=1)
                scores = _turn(q, places) @ past.keys[layer].swapaxes(1, 2) / SIZE**0.5
                seen = (distance >= 0) & (distance < window) if layer else distance >= 0
                weights = np.exp(np.minimum(scores, 60) + np.where(seen, 0, -np.inf).astype(np.float32))
                found = weights @ past.values[layer] / weights.sum(axis=-1, keepdims=True)
            x = x + found.swapaxes(0, 1).reshape(count, WIDTH) @ self._out[layer]
        logits = _norm(x[-1:])[0] @ self._head
        top = logits.max()
        return np.asarray(logits - top - np.log(np.exp(logits - top).sum()), np.float32)

    def _recur(self, q: Array, k: Array, v: Array, past: Past, *, start: int) -> Array:
        """s = DECAY * s + k v / 4, output q s; all tokens at once, and the state at the end of each page."""
        count = q.shape[1]
        age = np.arange(count)[:, None] - np.arange(count)[None]
        decay = np.where(age >= 0, DECAY ** np.maximum(age, 0), 0).astype(np.float32) / 4
        since = (DECAY ** np.arange(1, count + 1)).astype(np.float32)
        found = (q @ k.swapaxes(1, 2) * decay) @ v + (q * since[:, None]) @ past.state
        done = 0
        while done < count:
            size = min(count - done, PAGE - (start + done) % PAGE)
            left = (DECAY ** np.arange(size - 1, -1, -1)).astype(np.float32)[:, None] / 4
            some = slice(done, done + size)
            past.state = np.float32(DECAY**size) * past.state + (k[:, some] * left).swapaxes(1, 2) @ v[:, some]
            done += size
            if (start + done) % PAGE == 0:
                past.states[start + done] = past.state
        return np.asarray(found, np.float32)


def _norm(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6), np.float32)


def _turn(x: Array, places: NDArray[np.int64]) -> Array:
    """Rotary positions: [H, T, S]."""
    angle = places[:, None] / 100.0 ** (np.arange(SIZE // 2) / (SIZE // 2))[None]
    cos, sin = (part.astype(np.float32) for part in (np.cos(angle), np.sin(angle)))
    a, b = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


Key = tuple[str, tuple[int, ...]]


class Cache:
    """Pages by salt and prefix. The oldest page makes room for a new one."""

    def __init__(self, *, pages: int, fault: Planted | None) -> None:
        self._pool: list[tuple[list[Array], list[Array], Array] | None] = [None] * pages
        self._at: OrderedDict[Key, int] = OrderedDict()
        self._next = 0
        self._owner: dict[int, Key] = {}
        self._fault = fault

    def find(self, salt: str, ids: list[int]) -> tuple[Past, int]:
        """State of the longest cached prefix, and its pages. At least one token is left."""
        past, pages = empty(), 0
        found = []
        while (pages + 1) * PAGE < len(ids) and (key := (salt, tuple(ids[: (pages + 1) * PAGE]))) in self._at:
            page = self._pool[self._at[key]]
            assert page is not None, "only pages that hold something are found"
            found.append(page)
            past.state = page[2]
            pages += 1
        for layer in range(2 if found else 0):
            past.keys[layer] = np.concatenate([page[0][layer] for page in found], axis=1)
            past.values[layer] = np.concatenate([page[1][layer] for page in found], axis=1)
        if self._fault is Planted.OTHER_RESTORE_POINT and pages:
            reached = tuple(ids[: pages * PAGE])
            later = [
                key for key in self._at if len(key[1]) == len(reached) + PAGE and key[1][: len(reached)] == reached
            ]
            if later:
                past.state = self._pool[self._at[later[0]]][2]  # type: ignore[index]
        return past, pages

    def keep(self, salt: str, ids: list[int], number: int, page: tuple[list[Array], list[Array], Array]) -> None:
        """Store page `number` of a prompt, unless it is there."""
        key = (salt, tuple(ids[: (number + 1) * PAGE]))
        if key in self._at:
            return
        slot, self._next = self._next, (self._next + 1) % len(self._pool)
        if slot in self._owner and self._fault is not Planted.STALE_PAGE:
            self._at.pop(self._owner[slot], None)
        self._at[key], self._owner[slot], self._pool[slot] = slot, key, page

    def clear(self) -> None:
        self._at.clear()
        self._owner.clear()


class Clock:
    """Time that passes only for tokens that are computed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CachedServer:
    """Answers requests; `app` is the ASGI application.

    Args:
        fault: None: it is right.
        pages: of the cache.
        has_logprobs, has_usage, has_completions: what it offers.
        cold_field: by which a request is cold: "cache_salt", "cache_prompt" as in llama.cpp's server, or none.
        model: its name.
        honours_salts: whether salts that it takes divide the cache.
    Attributes:
        listed: fields of its entry in the list of models.
        loading: requests for this list that it refuses at first, as its model is loading.
    """

    def __init__(
        self,
        fault: Planted | None = None,
        *,
        pages: int = 4000,
        has_logprobs: bool = True,
        has_usage: bool = True,
        has_completions: bool = True,
        cold_field: str = "cache_salt",
        honours_salts: bool = True,
        model: str = "tiny",
    ) -> None:
        self._name = model
        self.listed: dict[str, Any] = {"max_model_len": 8192}
        self.loading = 0
        self._model, self._cache, self._fault = Model(), Cache(pages=pages, fault=fault), fault
        self._has_logprobs, self._has_usage, self._cold_field = has_logprobs, has_usage, cold_field
        self._honours_salts = honours_salts
        self._running = self._hits = 0
        self._tools: dict[tuple[str, str], str] = {}
        self.clock = Clock()
        self.requests = 0
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/reset_prefix_cache", self._reset, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                *([Route("/v1/completions", self._completions, methods=["POST"])] if has_completions else ()),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.loading -= 1
        if self.loading >= 0:
            return JSONResponse({"error": {"message": "Loading model"}}, 503)
        return JSONResponse({"data": [{"id": self._name, **self.listed}]})

    async def _reset(self, request: Request) -> Response:
        self._cache.clear()
        return JSONResponse({})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        return await self._answer(body, body["prompt"], is_chat=False)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        system, *others = body["messages"]
        tools = json.dumps(body.get("tools", []), sort_keys=True)[:400]
        if self._fault is Planted.DROPPED_TOOLS:  # the tools of an earlier request for the same conversation stay
            tools = self._tools.setdefault((body.get("cache_salt", ""), system["content"]), tools)
        texts = [f"{one['role']}: {one.get('content') or ''}{one.get('tool_calls') or ''}\n" for one in others]
        return await self._answer(body, f"{system['content']}\n{tools}\n{''.join(texts)}assistant:", is_chat=True)

    async def _answer(self, body: dict[str, Any], text: str, *, is_chat: bool) -> Response:
        known = {"model", "prompt", "messages", "tools", "tool_choice", "max_tokens", "temperature", "logprobs"}
        known |= {"top_logprobs", "stream", self._cold_field}
        if unknown := body.keys() - known:
            return JSONResponse({"error": {"message": f"unknown field {min(unknown)}"}}, 400)
        self.requests += 1
        self._running += 1
        for _ in range(20):  # others arrive meanwhile
            await asyncio.sleep(0)
        try:
            found = self._generate(text, body, is_loaded=self._running >= 4)
        finally:
            self._running -= 1
        answer = self._form(*found, is_chat=is_chat, shows=bool(body.get("logprobs")))
        if not body.get("stream"):
            return JSONResponse(answer)
        return StreamingResponse((f"data: {json.dumps(answer)}\n\n" for _ in range(3)), media_type="text/event-stream")

    def _generate(
        self, text: str, body: dict[str, Any], *, is_loaded: bool
    ) -> tuple[list[tuple[int, Array]], dict[str, Any]]:
        ids = [_IDS[piece] for piece in _SPLIT.findall(text)]
        salt = str(body.get("cache_salt", "")) if self._honours_salts else ""
        if self._fault is Planted.OTHER_TENANT and salt:
            salt = str(zlib.crc32(salt.encode()) % 8)
        past, pages = self._cache.find(salt, ids) if body.get("cache_prompt", True) else (empty(), 0)
        hit = pages * PAGE
        self._hits += bool(pages)
        past = self._damaged(past, pages, is_loaded=is_loaded)
        offset = -1 if self._fault is Planted.WRONG_POSITION and hit else 0
        window = WINDOW - 1 if self._fault is Planted.WINDOW_OFF_BY_ONE and hit else WINDOW
        logits = self._model.run(ids[hit:], past, offset=offset, window=window)
        for end, state in past.states.items():
            page = [[layer[:, end - PAGE : end] for layer in part] for part in (past.keys, past.values)]
            self._cache.keep(salt, ids, end // PAGE - 1, (page[0], page[1], state))
        computed = len(ids) - (0 if self._fault is Planted.CLAIMS_COMPUTED else hit)
        self.clock.now += 0.001 * computed + 0.002
        if self._fault is Planted.LATER_TOKENS and hit:
            offset = 1
        tokens = []
        for _ in range(body["max_tokens"]):
            token = int(logits.argmax())
            tokens.append((token, logits))
            logits = self._model.run([token], past, offset=offset, window=window)
        claimed = hit + PAGE if self._fault is Planted.CLAIMS_TOO_MANY and hit and hit + 2 * PAGE < len(ids) else hit
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": claimed}}
        return tokens, usage if self._has_usage else {"prompt_tokens": len(ids)}

    def _damaged(self, past: Past, pages: int, *, is_loaded: bool) -> Past:
        is_bad = (self._fault is Planted.ONE_IN_FIFTY and self._hits % 50 == 0) or (
            self._fault is Planted.UNDER_LOAD and is_loaded
        )
        if not is_bad or pages < 2:
            return past
        # The first two pages of the values in the wrong order.
        order = np.r_[PAGE : 2 * PAGE, 0:PAGE, 2 * PAGE : pages * PAGE]
        return Past(past.keys, [layer[:, order] for layer in past.values], past.state)

    def _form(
        self, tokens: list[tuple[int, Array]], usage: dict[str, Any], *, is_chat: bool, shows: bool
    ) -> dict[str, Any]:
        text = "".join(_PIECES[token] for token, _ in tokens)
        tops = [[(_PIECES[one], float(found[one])) for one in found.argsort()[::-1][:_TOP]] for _, found in tokens]
        choice: dict[str, Any] = {"message": {"content": text}} if is_chat else {"text": text}
        if shows and self._has_logprobs:
            entries = [{"token": name, "logprob": value} for top in tops for name, value in top[:1]]
            if is_chat:
                for entry, top in zip(entries, tops, strict=True):
                    entry["top_logprobs"] = [{"token": name, "logprob": value} for name, value in top]
                choice["logprobs"] = {"content": entries}
            else:
                names, values = ([entry[part] for entry in entries] for part in ("token", "logprob"))
                choice["logprobs"] = {
                    "tokens": names,
                    "token_logprobs": values,
                    "top_logprobs": [dict(top) for top in tops],
                }
        return {"choices": [choice], "usage": usage}
