"""The HTTP server: the OpenAI API over an AsyncEngine, health, metrics and status.

A client that goes away is noticed while its request runs, streamed or not, and the request is cancelled in the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from raycache.config import Config, parse_bytes
from raycache.errors import EngineStoppedError, RayCacheError
from raycache.metrics import Metrics
from raycache.server.chat import ChatTemplate
from raycache.server.engine import AsyncEngine
from raycache.server.prepare import Generation, prepare_chat, prepare_completion
from raycache.server.problem import Problem, problem_of, unknown_model
from raycache.server.responses import AnswerForm, to_json
from raycache.server.run import answer, answer_stream, event
from raycache.server.schema import ChatBody, CompletionBody, parse_body, parse_json
from raycache.server.tokenizer import Tokenizer
from raycache.types import EngineInfo, EngineStats

_BODY_TIMEOUT_S = 60.0
_HEALTH_TIMEOUT_S = 5.0
_THREAD_BYTES = 32 * 1024  # larger bodies are tokenised in a thread, so that other streams go on
_CLIENT_GONE = 499  # no standard code exists; nobody reads it

T = TypeVar("T")


def build_app(engine: AsyncEngine, *, config: Config, info: EngineInfo, tokenizer: Tokenizer) -> Starlette:
    """The ASGI application.

    Args:
        engine: what runs the requests; it must be ready.
        config: group "server".
        info: of the engine.
        tokenizer: of the model.
    Raises:
        ConfigError: the chat template cannot be used.
    """
    api = _Api(engine, config=config, info=info, tokenizer=tokenizer)
    app = Starlette(
        routes=[
            Route("/v1/models", api.list_models),
            Route("/v1/models/{model:path}", api.show_model),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/status", api.status),
        ],
        middleware=[Middleware(_Authentication, key=config.api_key)] if config.api_key else [],
        exception_handlers={
            RayCacheError: _on_error,
            _ProblemError: _on_problem,
            _ClientGoneError: _on_client_gone,
            ClientDisconnect: _on_client_gone,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app


class _Api:
    """The endpoints."""

    def __init__(self, engine: AsyncEngine, *, config: Config, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._info = info
        self._tokenizer = tokenizer
        self._template = ChatTemplate.load(tokenizer, path=config.chat_template)
        self._metrics = Metrics(info.model)
        self._max_body = parse_bytes("max_body", config.max_body)
        self._timeout_s = config.request_timeout_s

    async def list_models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def show_model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._model_card())

    async def completions(self, request: Request) -> Response:
        raw = await _read_body(request, limit=self._max_body)
        body = parse_body(CompletionBody, parse_json(raw))
        self._check_model(body.model)
        prepare = partial(
            prepare_completion, body, tokenizer=self._tokenizer, info=self._info, timeout_s=self._timeout_s
        )
        return await self._respond(request, await _run_long(prepare, size=len(raw)))

    async def chat_completions(self, request: Request) -> Response:
        raw = await _read_body(request, limit=self._max_body)
        body = parse_body(ChatBody, parse_json(raw))
        self._check_model(body.model)
        prepare = partial(
            prepare_chat,
            body,
            tokenizer=self._tokenizer,
            template=self._template,
            info=self._info,
            timeout_s=self._timeout_s,
        )
        return await self._respond(request, await _run_long(prepare, size=len(raw)))

    async def health(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self._engine.stats()
        except TimeoutError as error:
            raise EngineStoppedError(f"the engine has not answered for {_HEALTH_TIMEOUT_S:.0f} s") from error
        return PlainTextResponse("ok\n")

    async def metrics(self, request: Request) -> Response:
        text = self._metrics.render(await self._engine.stats())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        info, stats = await self._engine.info(), await self._engine.stats()
        return _json({**_plain(info), **_plain(stats)})

    async def _respond(self, request: Request, generation: Generation) -> Response:
        form = AnswerForm(generation, tokenizer=self._tokenizer)
        headers = {"X-Request-Id": generation.generation_id}
        if not generation.body.stream:
            whole = answer(self._engine, generation, form=form, metrics=self._metrics)
            return Response(await _unless_gone(request.receive, whole), headers=headers, media_type="application/json")
        events = answer_stream(self._engine, generation, form=form, metrics=self._metrics)
        # Wait for the first event before any header is sent: until then an error still has an HTTP status.
        first = await _unless_gone(request.receive, _next(events))
        return _EventStream(first, events, headers=headers)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._info.model,
            "object": "model",
            "created": 0,
            "owned_by": "raycache",
            "max_model_len": self._info.max_model_len,
        }

    def _check_model(self, name: str) -> None:
        if name != self._info.model:
            raise _ProblemError(unknown_model(name, self._info.model))


class _EventStream(Response):
    """Sends server-sent events until they end or the client goes away."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], *, headers: dict[str, str]) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(_ClientGoneError):
            await _unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            last = b""
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except RayCacheError as error:  # the status is sent already
                last = event(to_json(problem_of(error).body), name=b"error")
            await send({"type": "http.response.body", "body": last, "more_body": False})


class _Authentication:
    """Lets only requests with the API key reach /v1 and /status."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._wanted = b"Bearer " + key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"].startswith("/v1") or scope["path"] == "/status"):
            sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(sent, self._wanted):
                problem = Problem(
                    401,
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await _response(problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _ProblemError(Exception):
    """Ends a request with an error answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class _ClientGoneError(Exception):
    """The client closed its connection."""


async def _read_body(request: Request, *, limit: int) -> bytes:
    """Read the body, and never more than `limit` bytes of it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps web pages out: a browser sends this type to another site only if that site agrees.
        raise _ProblemError(Problem(415, f"send the header Content-Type: application/json, got {kind or 'none'!r}"))
    announced = request.headers.get("content-length", "0")
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            if announced.isdigit() and int(announced) > limit:
                raise _too_large(limit)
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        problem = Problem(408, f"the body did not arrive within {_BODY_TIMEOUT_S:.0f} s", headers=_CLOSE)
        raise _ProblemError(problem) from error
    return b"".join(parts)


_CLOSE = {"Connection": "close"}  # the rest of the body is not read


def _too_large(limit: int) -> _ProblemError:
    message = f"the body is larger than {limit} bytes; the server's setting is --max-body"
    return _ProblemError(Problem(413, message, code="body_too_large", headers=_CLOSE))


async def _run_long(work: Callable[[], T], *, size: int) -> T:
    """Result of `work`, run in a thread if the body that it works on is large."""
    return work() if size < _THREAD_BYTES else await asyncio.to_thread(work)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, which is cancelled when the client goes away.

    Raises:
        _ClientGoneError: it went.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _plain(facts: EngineInfo | EngineStats) -> dict[str, Any]:
    return dataclasses.asdict(facts)


def _json(value: dict[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")


def _response(problem: Problem) -> Response:
    return Response(to_json(problem.body), problem.status, dict(problem.headers), "application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RayCacheError)
    return _response(problem_of(error))


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, _ProblemError)
    return _response(error.problem)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _response(Problem(error.status_code, message, headers=error.headers or {}))


async def _on_bug(request: Request, error: Exception) -> Response:
    return _response(Problem(500, "the server failed; its log has the reason"))
