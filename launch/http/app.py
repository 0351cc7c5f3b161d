"""The ASGI application: the OpenAI API over an AsyncEngine, health, metrics and status.

When a client disconnects, its request is cancelled in the engine, whether it is streamed or not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.http.auth import Authentication, owned
from launch.http.cache import CacheApi
from launch.http.followers import Followers
from launch.http.keys import Keys, keys_of
from launch.http.messages import MessagesApi
from launch.http.openapi import openapi
from launch.http.page import UiPage
from launch.http.responses import ResponsesApi
from launch.http.tokens import TokensApi
from launch.http.tree import TreeApi
from launch.http.wire import Bodies, ProblemError, compute, json_response, problem_response
from launch.observe.requests import Observed
from raycache import __version__
from raycache.api.completions_form import CompletionsForm, to_json
from raycache.api.defaults import Defaults
from raycache.api.engine import AsyncEngine
from raycache.api.grammar_checker import GrammarChecker
from raycache.api.prepare import Generation, Served, prepare_chat, prepare_completion
from raycache.api.problem import Problem, problem_of, unknown_model
from raycache.api.prompt_ids import CompletionReader
from raycache.api.run import AnswerForm, answer, answer_stream, failure_event, with_pings
from raycache.api.schema import ChatBody, CompletionBody, parse_body, parse_json
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import EngineStoppedError, RayCacheError, RequestError
from raycache.observe.logs import REQUEST_ID
from raycache.observe.metrics import Metrics
from raycache.types import EngineInfo, EngineStats

_HEALTH_TIMEOUT_S = 5.0
REPAIRS_HEADER = "X-RayCache-Repairs"  # those that have changed the request
_CHAT_EXAMPLE = '{"model": "...", "messages": [{"role": "user", "content": "..."}]}'
_CLIENT_GONE = 499  # nginx's code, for metrics and logs only
_STOPPING = EngineStoppedError("the server stops")

T = TypeVar("T")


def build_app(
    engine: AsyncEngine,
    *,
    config: Config,
    info: EngineInfo,
    tokenizer: Tokenizer,
    defaults: Defaults | None = None,
    routes: Sequence[Route] = (),
    observed: Observed | None = None,
) -> Starlette:
    """Build the ASGI application.

    Args:
        engine: must be ready.
        defaults: of requests; None: those of `config`, whose model must be a directory here.
        routes: additional routes; outside /v1 they require the right "admin".
        observed: metrics, traces and access log; default: metrics only.
    Raises:
        ConfigError: the chat template or the API key file cannot be used.
    """
    observed = observed or Observed(Metrics(info.model))
    served = Served.of(config, tokenizer=tokenizer, info=info, defaults=defaults or Defaults.of(config))
    followers = Followers(engine, config=config, info=info, tokenizer=tokenizer)
    observed.metrics.read_reuse(followers.achievable.samples)
    api = _Api(engine, config=config, served=served, metrics=observed.metrics, followers=followers)
    cache = CacheApi(engine, config=config, model=info.model, prepare=api.prepare)
    tokens = TokensApi(served, bodies=api.bodies)
    keys = keys_of(config)
    tree = TreeApi(engine, config=config, info=info, tokenizer=tokenizer, keys=keys)
    messages = MessagesApi(served, config=config, bodies=api.bodies, prepare=api.prepare, respond=api.respond)
    kept_page_size = info.page_size if config.prefix_cache else 0
    responses = ResponsesApi(api, tokenizer=tokenizer, bodies=api.bodies, kept_page_size=kept_page_size)
    app = Starlette(
        routes=[
            *api.routes(),
            *responses.routes(),
            *followers.routes(),
            *tree.routes(),
            *UiPage(config).routes(),
            *cache.routes(),
            *tokens.routes(),
            *messages.routes(),
            *routes,
        ],
        middleware=_middleware(config, observed, keys),
        exception_handlers={
            RayCacheError: _on_error,
            ProblemError: _on_problem,
            _ClientGoneError: _on_client_gone,
            ClientDisconnect: _on_client_gone,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app


def _middleware(config: Config, observed: Observed, keys: Keys | None) -> list[Middleware]:
    """Middleware, the outermost first."""
    found = [observed.middleware, Middleware(_Stopping)]
    if config.origins:  # before authentication: browsers ask for permission without a key
        cors: dict[str, Any] = {
            "allow_methods": ("GET", "POST"),
            "allow_headers": ("*",),
            "allow_private_network": True,
        }
        shown = ("X-Request-Id", "request-id", "Retry-After", REPAIRS_HEADER)
        found.append(Middleware(CORSMiddleware, allow_origins=config.origins, expose_headers=shown, **cors))
    if keys is not None:
        found.append(Middleware(Authentication, keys=keys))
    return found


class _Api:
    """The endpoints.

    Attributes:
        bodies: reads the bodies of requests.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        config: Config,
        served: Served,
        metrics: Metrics,
        followers: Followers,
    ) -> None:
        self._engine, self._followers = engine, followers
        self._info, self._tokenizer, self._served = served.info, served.tokenizer, served
        self._description = to_json(openapi(served.info, served.defaults))
        self._grammars = GrammarChecker(served.tokenizer, served.info)
        self._metrics = metrics
        self.bodies = Bodies(config)
        self._eviction = config.eviction
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [
            Route("/", self.welcome),
            Route("/v1/models", self.list_models),
            Route("/v1/models/", self.list_models),
            Route("/v1/models/{model:path}", self.show_model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/health", self.health),
            Route("/ping", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/status", self.status),
            Route("/openapi.json", self.openapi),
        ]

    async def welcome(self, request: Request) -> Response:
        return PlainTextResponse(f"RayCache serves {self._info.model}; GET /openapi.json lists the paths.\n")

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def list_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._info.model:
            raise ProblemError(unknown_model(name, self._info.model))
        return json_response(self._model_card())

    async def completions(self, request: Request) -> Response:
        reader = CompletionReader()
        async with self.bodies.receive(request, reader.feed):
            # Of token ids, only digests of their pages take long.
            size = reader.num_bytes if self._info.chained_weights else reader.num_text_bytes
            return await self._generate(request, lambda: parse_body(CompletionBody, reader.values()), size=size)

    async def chat_completions(self, request: Request) -> Response:
        async with self.bodies.read(request) as raw:
            return await self._generate(request, lambda: _chat_body(raw), size=len(raw))

    async def health(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self._engine.stats()
        except TimeoutError as error:
            raise EngineStoppedError(f"the engine has not responded for {_HEALTH_TIMEOUT_S:.0f} s") from error
        return PlainTextResponse("ok\n")

    async def metrics(self, request: Request) -> Response:
        # Also without a running engine: that is when metrics matter most.
        with suppress(EngineStoppedError, TimeoutError):
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                self._metrics.show(await self._engine.stats())
                return self._shown()
        self._metrics.show(None)
        return self._shown()

    def _shown(self) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        info, stats = await self._engine.info(), await self._engine.stats()
        return json_response({**_plain(info), **_plain(stats), **self._followers.achievable.summary(stats)})

    async def openapi(self, request: Request) -> Response:
        return Response(self._description, media_type="application/json")

    async def prepare(self, body: CompletionBody | ChatBody, *, size: int, cuts_max_tokens: bool = False) -> Generation:
        """Convert a validated body to engine requests; `size`: of the body in bytes."""
        return await compute(partial(self._prepared, body, cuts_max_tokens=cuts_max_tokens), size=size)

    def _prepared(self, body: CompletionBody | ChatBody, *, cuts_max_tokens: bool = False) -> Generation:
        if body.model != self._info.model:
            raise ProblemError(unknown_model(body.model, self._info.model))
        if body.cache_priority and self._eviction != "priority":
            raise RequestError(
                f"cache_priority has no effect with --eviction {self._eviction}; start the server with "
                "--eviction priority, or omit cache_priority",
                field="cache_priority",
            )
        match body:
            case CompletionBody():
                return prepare_completion(body, self._served)
            case ChatBody():
                return prepare_chat(body, self._served, cuts_max_tokens=cuts_max_tokens)

    async def _generate(
        self, request: Request, parse: Callable[[], CompletionBody | ChatBody], *, size: int
    ) -> Response:
        """Answer a request; `size`: of the text that `parse` reads, in bytes."""
        generation = await compute(lambda: self._prepared(owned(parse(), request)), size=size)
        return await self.respond(request, generation, CompletionsForm(generation, tokenizer=self._tokenizer))

    async def respond(
        self, request: Request, generation: Generation, form: AnswerForm, *, ping: bytes = b""
    ) -> Response:
        """Check the grammar of a generation and run it; its answer is written by `form`, whole or as a stream.

        Args:
            ping: sent while the first event of a stream is long in coming; an error after it has the status 200.
        """
        REQUEST_ID.set(generation.generation_id)
        if generation.constrained_by:
            check = self._grammars.check(generation.grammar, field=generation.constrained_by)
            await _unless_gone(request.receive, check)
        headers = {"X-Request-Id": generation.generation_id}
        if generation.repairs:
            headers[REPAIRS_HEADER] = ", ".join(generation.repairs)
        follow = self._followers.of(request)
        if not generation.body.stream:
            whole = answer(self._engine, generation, form=form, metrics=self._metrics, follow=follow)
            return Response(await _unless_gone(request.receive, whole), headers=headers, media_type="application/json")
        events = answer_stream(self._engine, generation, form=form, metrics=self._metrics, follow=follow)
        if ping:
            events = with_pings(events, ping)
        # Wait for the first event before sending headers, so that an early error still gets an HTTP status.
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(aclosing(events))
            first = await _unless_gone(request.receive, _next(events))
            stack.pop_all()
        return _EventStream(first, events, form=form, headers=headers)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._info.model,
            "object": "model",
            "created": self._created,
            "owned_by": "raycache",
            "max_model_len": self._info.max_model_len,
            **self._served.defaults.card,
        }


def _chat_body(raw: bytes) -> ChatBody:
    return parse_body(ChatBody, parse_json(raw, example=_CHAT_EXAMPLE))


class _Stopping:
    """Answers requests that are cancelled, as the server does when their time to end is over, with 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = is_complete = False

        async def note(message: Message) -> None:
            nonlocal is_started, is_complete
            is_started = True
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if not is_started:
                await problem_response(problem_of(_STOPPING), scope)(scope, receive, send)
            elif not is_complete:
                raise


class _EventStream(Response):
    """Sends server-sent events until they end or the client disconnects."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], *, form: AnswerForm, headers: dict[str, str]
    ) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with suppress(_ClientGoneError):
                await _unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        last = b""
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except RayCacheError as error:  # the status has already been sent
            last = failure_event(self._form, error)
        except asyncio.CancelledError:  # the client has left, or the server stops
            last = failure_event(self._form, _STOPPING)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            raise
        await send({"type": "http.response.body", "body": last, "more_body": False})


class _ClientGoneError(Exception):
    """The client closed its connection."""


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it if the client disconnects.

    Raises:
        _ClientGoneError: the client disconnected.
    """
    task, watch = _started_eagerly(work), asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _started_eagerly(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has run to its first wait, where Python can do that (3.12).

    Of requests that arrive together, the first is thus with the engine before the next is parsed. Otherwise the event
    loop parses all of them first.
    """
    if sys.version_info < (3, 12):
        return asyncio.create_task(work)
    return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _plain(facts: EngineInfo | EngineStats) -> dict[str, Any]:
    return dataclasses.asdict(facts)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RayCacheError)
    return problem_response(problem_of(error), request.scope)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(error.problem, request.scope)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = _where_to_look(request) if error.status_code == 404 else ""
    message = f"{request.method} {request.url.path}: {error.detail}{where}"
    return problem_response(Problem(error.status_code, message, headers=error.headers or {}), request.scope)


def _where_to_look(request: Request) -> str:
    """Base URLs with `/v1` too many or too few are common: OpenAI's clients expect it there, Anthropic's add it."""
    path = request.url.path
    paths = {route.path for route in request.app.routes if isinstance(route, Route)}
    near = next((other for other in (f"/v1{path}", path.removeprefix("/v1")) if other in paths and other != path), None)
    return f"; did you mean {near}?" if near else "; GET /openapi.json lists the paths"


async def _on_bug(request: Request, error: Exception) -> Response:
    return problem_response(Problem(500, "internal error; see the server's log"), request.scope)
