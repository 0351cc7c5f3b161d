"""The operator's endpoints: GET /cache, and POST /cache/{attach,detach,clear,resize,scrub,inspect}.

Who may send requests may also give orders, with one exception: a server without an API key takes orders from this
machine only, because an order can name a directory of it or empty the cache.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.wire import ProblemError, json_response, read_body
from raycache.config import Config, parse_bytes
from raycache.errors import ConfigError, RequestError
from raycache.server.admin import inspect_order, parse_inspected, parse_order
from raycache.server.engine import AsyncEngine
from raycache.server.prepare import Generation
from raycache.server.problem import Problem
from raycache.server.schema import ChatBody, CompletionBody, parse_json
from raycache.types import CacheAction, CacheOrder

_SETTINGS = (
    "host_memory",
    "write_policy",
    "eviction",
    "prefetch",
    "prefetch_timeout_s",
    "prefetch_share",
    "storage_lanes",
)
"""Shown to operators. Not the storage: it can be another one by now, and its URL can hold a password."""


class Prepare(Protocol):
    """Makes a request ready to run, as its own endpoint would."""

    def __call__(self, body: CompletionBody | ChatBody, *, size: int) -> Awaitable[Generation]:
        """`size` is that of the whole body, in bytes."""
        ...


class CacheApi:
    """The endpoints.

    Args:
        engine: that has the cache.
        config: of the service.
        model: name that clients use.
        prepare: for the prompts that are inspected.
    """

    def __init__(self, engine: AsyncEngine, *, config: Config, model: str, prepare: Prepare) -> None:
        self._engine = engine
        self._settings = {name: getattr(config, name) for name in _SETTINGS}
        self._model = model
        self._prepare = prepare
        self._max_body = parse_bytes("max_body", config.max_body)
        self._is_open = not config.api_key

    def routes(self) -> list[Route]:
        """For the application."""
        return [Route("/cache", self.status), Route("/cache/{action}", self.order, methods=["POST"])]

    async def status(self, request: Request) -> Response:
        """Settings, what the tiers hold, their counters, and warnings."""
        info, found = await self._engine.info(), await self._engine.admin(CacheOrder(CacheAction.STATUS))
        return json_response({"settings": self._settings, "capacity": _plain(info.tiers), **_plain(found)})

    async def order(self, request: Request) -> Response:
        """Carry out one order, and answer with what was done."""
        action = _action(request.path_params["action"])
        self._check_sender(request)
        raw = await read_body(request, limit=self._max_body)
        values = parse_json(raw or b"{}")
        if action is CacheAction.INSPECT:
            body = parse_inspected(values, model=self._model)
            order = inspect_order(await self._prepare(body, size=len(raw)))
        else:
            order = parse_order(action, values)
        try:
            return json_response(_plain(await self._engine.admin(order)))
        except ConfigError as refusal:
            raise RequestError(str(refusal)) from refusal

    def _check_sender(self, request: Request) -> None:
        if self._is_open and not _is_from_here(request):
            text = "without an API key this server takes orders from its own machine only; set RAYCACHE_API_KEY for it"
            raise ProblemError(Problem(403, text, code="api_key_needed"))


def _action(name: str) -> CacheAction:
    known = [action for action in CacheAction if action is not CacheAction.STATUS]
    if name not in known:
        raise ProblemError(Problem(404, f"no order to the cache is called {name!r}; known: {', '.join(known)}"))
    return CacheAction(name)


def _is_from_here(request: Request) -> bool:
    if request.client is None:
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionaries all the way down, as JSON wants them."""
    return {name: _plain(item) if isinstance(item, Mapping) else item for name, item in value.items()}
