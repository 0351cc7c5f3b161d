"""Operator endpoints: GET /cache, and POST /cache/{attach,detach,clear,resize,scrub,inspect,flush}.

They require the API key, or a tenant with the right "admin". A server without keys accepts commands only from its own
machine, since they can clear the cache or name a directory there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import check_operator, owned
from launch.http.wire import ProblemError, json_response, read_body
from raycache.api.admin import inspect_command, parse_command, parse_inspected
from raycache.api.engine import AsyncEngine
from raycache.api.prepare import Generation
from raycache.api.problem import Problem
from raycache.api.schema import ChatBody, CompletionBody, parse_json
from raycache.config import Config, parse_bytes
from raycache.errors import ConfigError, RequestError
from raycache.types import CacheAction, CacheCommand

_SETTINGS = (
    "host_memory",
    "write_policy",
    "eviction",
    "prefetch",
    "prefetch_timeout_s",
    "prefetch_share",
)
"""Settings in the response. Not the storage: it may have been replaced, and its URL can hold a password."""


class Prepare(Protocol):
    """Prepares a request like the endpoint for it."""

    def __call__(self, body: CompletionBody | ChatBody, *, size: int) -> Awaitable[Generation]:
        """`size`: of the whole body, in bytes."""
        ...


class CacheApi:
    """The endpoints.

    Args:
        model: name that clients use.
    """

    def __init__(self, engine: AsyncEngine, *, config: Config, model: str, prepare: Prepare) -> None:
        self._engine = engine
        self._settings = {name: getattr(config, name) for name in _SETTINGS}
        self._model = model
        self._prepare = prepare
        self._max_body = parse_bytes("max_body", config.max_body)
        self._config = config

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [Route("/cache", self.status), Route("/cache/{action}", self.carry_out, methods=["POST"])]

    async def status(self, request: Request) -> Response:
        """Return settings, contents and counters of the tiers, and warnings."""
        command = CacheCommand(CacheAction.STATUS, replica=request.query_params.get("replica", ""))
        info, found = await self._engine.info(), await self._carry_out(command)
        return json_response({"settings": self._settings, "capacity": _plain(info.tiers), **_plain(found)})

    async def carry_out(self, request: Request) -> Response:
        """Carry out a command and return its result."""
        action = _action(request.path_params["action"])
        check_operator(request, self._config)
        raw = await read_body(request, limit=self._max_body, may_be_empty=True)
        values = parse_json(raw or b"{}")
        if action is CacheAction.INSPECT:
            body = owned(parse_inspected(values, model=self._model), request)
            command = inspect_command(await self._prepare(body, size=len(raw)))
        else:
            command = parse_command(action, values)
        command = replace(command, replica=request.query_params.get("replica", ""))
        return json_response(_plain(await self._carry_out(command)))

    async def _carry_out(self, command: CacheCommand) -> Mapping[str, Any]:
        try:
            return await self._engine.admin(command)
        except ConfigError as refusal:
            raise RequestError(str(refusal)) from refusal


def _action(name: str) -> CacheAction:
    known = [action for action in CacheAction if action not in (CacheAction.STATUS, CacheAction.TREE)]
    if name not in known:
        raise ProblemError(Problem(404, f"unknown cache command {name!r}; use one of {', '.join(known)}"))
    return CacheAction(name)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Convert nested mappings to dicts, for JSON."""
    return {name: _plain(item) if isinstance(item, Mapping) else item for name, item in value.items()}
