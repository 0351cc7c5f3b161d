"""POST /v1/responses: the OpenAI Responses API, without anything stored."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import owned
from launch.http.wire import Bodies, compute
from raycache.api.field_names import renamed
from raycache.api.prepare import Generation
from raycache.api.responses_body import CHAT_NAMES, ResponsesRequest, parse_responses
from raycache.api.responses_form import ResponsesForm
from raycache.api.run import AnswerForm
from raycache.api.schema import ChatBody, parse_json
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError

_MOST_TOLD = 64  # types of tools; clients name them

_log = logging.getLogger(__name__)


class Chats(Protocol):
    """Runs chats."""

    def prepare(self, body: ChatBody, *, size: int) -> Awaitable[Generation]:
        """Convert a validated body to engine requests; `size`: of the whole body, in bytes."""
        ...

    def respond(self, request: Request, generation: Generation, form: AnswerForm) -> Awaitable[Response]:
        """Run a generation; its answer is written by `form`."""
        ...


class ResponsesApi:
    """The endpoint.

    Args:
        kept_page_size: tokens of a cache page; 0: prompts are not kept.
    """

    def __init__(self, chats: Chats, *, tokenizer: Tokenizer, bodies: Bodies, kept_page_size: int) -> None:
        self._chats = chats
        self._tokenizer = tokenizer
        self._bodies = bodies
        self._kept_page_size = kept_page_size
        self._told: set[str] = set()
        self._told_of_grammars = False

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Answer a conversation."""
        async with self._bodies.read(request) as raw:
            asked = await compute(partial(_parse, raw), size=len(raw))
            self._tell(asked)
            try:
                generation = await self._chats.prepare(owned(asked.chat, request), size=len(raw))
                form = ResponsesForm(asked, generation, tokenizer=self._tokenizer, kept_page_size=self._kept_page_size)
                return await self._chats.respond(request, generation, form)
            except RequestError as error:
                raise renamed(error, CHAT_NAMES) from error

    def _tell(self, asked: ResponsesRequest) -> None:
        """Log what is not done as asked, and each type of tool that is left out, once."""
        if asked.has_grammars and not self._told_of_grammars:
            self._told_of_grammars = True
            _log.warning("grammars of custom tools are shown to the model and not enforced")
        for kind in asked.ignored_tools:
            if kind not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(kind)
                _log.warning("tools of type %r are not served; /v1/responses leaves them out of the prompt", kind)


def _parse(raw: bytes) -> ResponsesRequest:
    return parse_responses(parse_json(raw, example='{"model": "...", "input": "..."}'))
