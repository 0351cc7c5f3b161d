"""POST /v1/messages and /v1/messages/count_tokens, in the shapes of Anthropic's API."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import owned
from launch.http.wire import MESSAGES_PATH, Bodies, ProblemError, compute, json_response
from raycache.api.field_names import renamed
from raycache.api.messages_body import Conversation, CountTokensBody, MessagesBody, conversation
from raycache.api.messages_form import MessagesForm
from raycache.api.prepare import Generation, Served, chat_prompt
from raycache.api.problem import unknown_model
from raycache.api.run import AnswerForm
from raycache.api.schema import ChatBody, parse_body, parse_json
from raycache.config import Config
from raycache.errors import PromptTooLongError, RequestError

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_EXAMPLE = '{"model": "...", "max_tokens": 1024, "messages": [{"role": "user", "content": "..."}]}'
_MAX_TYPES = 64  # named in warnings; clients choose them
_MAX_TYPE_CHARS = 64

_log = logging.getLogger(__name__)
Body = TypeVar("Body", bound=CountTokensBody)


class Prepare(Protocol):
    """Prepares a chat like /v1/chat/completions."""

    def __call__(self, body: ChatBody, *, size: int, cuts_max_tokens: bool) -> Awaitable[Generation]:
        """`size`: of the whole body, in bytes."""
        ...


class Respond(Protocol):
    """Runs a generation and writes its answer in a form."""

    def __call__(
        self, request: Request, generation: Generation, form: AnswerForm, *, ping: bytes
    ) -> Awaitable[Response]:
        """The response, which may be a stream; `ping`: event sent while it is long in coming."""
        ...


class MessagesApi:
    """The endpoints.

    Args:
        served: the model.
        bodies: reads the bodies of requests.
    """

    def __init__(self, served: Served, *, config: Config, bodies: Bodies, prepare: Prepare, respond: Respond) -> None:
        self._served, self._bodies, self._prepare, self._respond = served, bodies, prepare, respond
        self._kept_page_size = served.info.page_size if config.prefix_cache else 0
        self._warned: set[str] = set()
        self._has_warned_of_budget = False

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [
            Route(MESSAGES_PATH, self.create, methods=["POST"]),
            Route(f"{MESSAGES_PATH}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Answer a conversation."""
        async with self._bodies.read(request) as raw:
            asked = await compute(partial(self._convert, MessagesBody, raw), size=len(raw))
            self._warn(asked.ignored)
            try:
                chat = owned(self._bounded(asked.chat), request)
                generation = await self._prepare(chat, size=len(raw), cuts_max_tokens=True)
                form = MessagesForm(generation, kept_page_size=self._kept_page_size)
                response = await self._respond(request, generation, form, ping=_PING)
            except PromptTooLongError as error:
                raise _in_its_words(error) from error
            except RequestError as error:
                raise renamed(error, asked.names) from error
        response.headers["request-id"] = generation.generation_id
        return response

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of the prompt that the same body has in `create`."""
        async with self._bodies.read(request) as raw:
            asked = await compute(partial(self._convert, CountTokensBody, raw), size=len(raw))
            self._warn(asked.ignored)
            try:
                chat = owned(asked.chat, request)
                prompt = await compute(partial(chat_prompt, chat, self._served), size=len(raw))
            except RequestError as error:
                raise renamed(error, asked.names) from error
        return json_response({"input_tokens": len(prompt)})

    def _convert(self, kind: type[Body], raw: bytes) -> Conversation:
        body = parse_body(kind, parse_json(raw, example=_EXAMPLE))
        if body.model != self._served.info.model:
            raise ProblemError(unknown_model(body.model, self._served.info.model))
        return conversation(body, has_priorities=self._served.has_priorities)

    def _bounded(self, chat: ChatBody) -> ChatBody:
        """Without a budget that cannot be kept: clients send one whenever they ask for thinking."""
        if chat.thinking_token_budget is None or self._served.chat.bounds_reasoning:
            return chat
        if not self._has_warned_of_budget:
            self._has_warned_of_budget = True
            _log.warning("budget_tokens is ignored: the length of this model's reasoning cannot be limited")
        return chat.model_copy(update={"thinking_token_budget": None})

    def _warn(self, ignored: Iterable[str]) -> None:
        for kind in sorted({kind[:_MAX_TYPE_CHARS] for kind in ignored} - self._warned):
            if len(self._warned) < _MAX_TYPES:
                self._warned.add(kind)
                _log.warning("tools and blocks of type %r are ignored; only Anthropic's servers know them", kind)


def _in_its_words(error: PromptTooLongError) -> PromptTooLongError:
    """The error as clients of this API expect it: they look for the words, and shorten the conversation."""
    counts = f"{error.num_tokens} tokens > {error.limit} maximum" if error.num_tokens else error.message
    return PromptTooLongError(f"prompt is too long: {counts}", field=error.field)
