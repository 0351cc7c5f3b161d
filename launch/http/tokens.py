"""POST /tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import owned
from launch.http.wire import Bodies, ProblemError, compute
from raycache.api.completions_form import to_json
from raycache.api.prepare import Served, chat_prompt
from raycache.api.problem import unknown_model
from raycache.api.schema import parse_body, parse_json
from raycache.api.tokenize_body import DetokenizeBody, TokenizeBody
from raycache.errors import RequestError

T = TypeVar("T")


class TokensApi:
    """The endpoints."""

    def __init__(self, served: Served, *, bodies: Bodies) -> None:
        self._served, self._info, self._tokenizer, self._bodies = served, served.info, served.tokenizer, bodies

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text, or of a conversation in the chat template."""
        return await self._answer(request, partial(self._tokenized, request))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        return await self._answer(request, self._detokenized)

    async def _answer(self, request: Request, work: Callable[[dict[str, Any]], dict[str, Any]]) -> Response:
        async with self._bodies.read(request) as raw:
            whole = partial(_parsed, raw, work)
            answer = await compute(lambda: to_json(whole()), size=len(raw))
        return Response(answer, media_type="application/json")

    def _tokenized(self, request: Request, values: dict[str, Any]) -> dict[str, Any]:
        body = parse_body(TokenizeBody, values)
        self._check_model(body.model)
        if body.prompt is not None:
            tokens = self._tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            tokens = chat_prompt(owned(body.chat(model=self._info.model), request), self._served)
        strings = [self._tokenizer.token_text(token_id) for token_id in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self._info.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }

    def _detokenized(self, values: dict[str, Any]) -> dict[str, Any]:
        body = parse_body(DetokenizeBody, values)
        self._check_model(body.model)
        if wrong := [token_id for token_id in body.tokens if not 0 <= token_id < self._info.vocab_size]:
            raise RequestError(
                f"tokens contains token id {wrong[0]}; valid ids are in [0, {self._info.vocab_size})", field="tokens"
            )
        return {"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._info.model):
            raise ProblemError(unknown_model(str(model), self._info.model))


def _parsed(raw: bytes, work: Callable[[dict[str, Any]], T]) -> T:
    return work(parse_json(raw))
