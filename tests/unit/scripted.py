"""An engine that follows a script, and the server's application over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from launch.http.app import build_app
from launch.http.bind import bind
from launch.http.serve import serve
from launch.observe.requests import Observed
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import EngineStoppedError, RayCacheError
from raycache.types import (
    CacheCommand,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    StreamState,
    TokenLogprob,
)

TEXT = "one two three Grüße 東京 🎉 four five six seven eight nine ten"


class ScriptedEngine:
    """Answers every request with the same text, a token at a time."""

    def __init__(self, tokenizer: Tokenizer, *, text: str = TEXT, context: int = 200, delay_s: float = 0.0) -> None:
        self._script = tokenizer.encode(text, add_special_tokens=False)
        self._eos = tokenizer.eos_id or 0
        self.delay_s = delay_s
        self._context = context
        self.vocab_size = tokenizer.vocab_size
        self.refusal: RayCacheError | None = None
        self.failure: tuple[int, FinishReason] | None = None  # after so many tokens
        self.requests: list[GenerateRequest] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.reuse: dict[str, Any] = {}  # more fields of every output
        self.chained_weights = ""
        self.figures: dict[str, Any] = {}  # more fields of the stats
        self.states: dict[str, StreamState] = {}  # by request id
        self.commands: list[CacheCommand] = []
        self.answer: Mapping[str, Any] | RayCacheError = {}  # to all commands

    async def info(self) -> EngineInfo:
        return EngineInfo(
            "tiny",
            "/models/tiny",
            self.vocab_size,
            (self._eos,),
            self._context,
            16,
            64,
            8,
            tiers={"host": {"tokens": 4096}},
            chained_weights=self.chained_weights,
        )

    async def stats(self) -> EngineStats:
        if isinstance(self.refusal, EngineStoppedError):
            raise self.refusal
        figures = {
            "steps": 7,
            "running": len(self.running),
            "finished": {"stop": 3},
            "pages_total": 64,
            "pages_free": 64,
        }
        return EngineStats(**(figures | self.figures))

    async def stream_states(self, request_ids: Sequence[str]) -> Mapping[str, StreamState]:
        if isinstance(self.refusal, EngineStoppedError):
            raise self.refusal
        return {each: self.states[each] for each in request_ids if each in self.states}

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        self.commands.append(command)
        if isinstance(self.answer, RayCacheError):
            raise self.answer
        return self.answer

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            for output in self._outputs(request):
                await asyncio.sleep(self.delay_s)
                yield output
                if output.finish_reason is not None:
                    self.running.discard(request.request_id)
                    return
        finally:
            if request.request_id in self.running:
                self.running.discard(request.request_id)
                self.cancelled.append(request.request_id)

    def _outputs(self, request: GenerateRequest) -> Sequence[RequestOutput]:
        sampling = request.sampling
        script = [*self._script, self._eos]
        if sampling.ignore_eos:
            script = self._script * 1000
        prompt = self._logprobs(request.prompt, sampling, prompt=True)
        outputs = []
        for position, token_id in enumerate(script[: sampling.max_tokens]):
            reason = FinishReason.STOP if token_id == self._eos else None
            if reason is None and position + 1 in (sampling.max_tokens, len(script)):
                reason = FinishReason.LENGTH
            if self.failure is not None and self.failure[0] == position:
                outputs.append(RequestOutput(request.request_id, finish_reason=self.failure[1], error="rank 3 is lost"))
                break
            outputs.append(
                RequestOutput(
                    request.request_id,
                    (token_id,),
                    logprobs=self._logprobs([token_id], sampling),
                    prompt_logprobs=None if position or prompt is None else (None, *prompt[1:]),
                    finish_reason=reason,
                    **({"cached_tokens": len(request.prompt) // 2} | self.reuse),
                )
            )
        return outputs

    def _logprobs(
        self, ids: Sequence[int], sampling: SamplingParams, *, prompt: bool = False
    ) -> tuple[TokenLogprob, ...] | None:
        count = sampling.prompt_logprobs if prompt else sampling.logprobs
        if count is None:
            return None
        top = tuple((token_id, -0.5 * token_id if token_id else float("-inf")) for token_id in range(count))
        return tuple(TokenLogprob(token_id, -0.25, top) for token_id in ids)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def over_asgi(engine: ScriptedEngine, tokenizer: Tokenizer, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(engine, config=Config(**settings), info=await engine.info(), tokenizer=tokenizer)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@asynccontextmanager
async def over_port(
    engine: ScriptedEngine, tokenizer: Tokenizer, *, observed: Observed | None = None, **settings: Any
) -> AsyncIterator[str]:
    config = Config(port="auto", **settings)
    app = build_app(engine, config=config, info=await engine.info(), tokenizer=tokenizer, observed=observed)
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(app, sock=bind(config), stop=stop, on_started=started.set_result, config=config, grace_s=1.0)
    )
    try:
        yield await started
    finally:
        stop.set()
        await serving
