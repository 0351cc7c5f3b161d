"""Authentication and authorisation of requests, by the keys of keys.py."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from typing import TypeVar

from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from launch.http.keys import ADMIN, EVERYBODY, METRICS, Keys, Tenant
from launch.http.wire import ProblemError, problem_response
from raycache.api.problem import Problem
from raycache.api.schema import ChatBody, GenerationBody
from raycache.config import Config

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]*))(?::[0-9]*)?")
_TENANT = "raycache.tenant"  # in the ASGI scope
_OPEN_TO_ALL = frozenset(
    {"/", "/health", "/openapi.json", "/ping", "/version", "/ui", "/ui/", "/ui/app.js", "/ui/style.css"}
)
_OPEN_TO_KEYS = frozenset(
    {"/v1", "/tokenize", "/detokenize", "/cache/why", "/cache/tree", "/cache/achievable", "/streams", "/history"}
)

Body = TypeVar("Body", bound=GenerationBody)


class Authentication:
    """ASGI middleware that requires a valid key with the right for the path.

    Only the paths in _OPEN_TO_ALL need no key, so new routes are protected by default. Any key can access /v1
    and those in _OPEN_TO_KEYS; everything else needs a right.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app, self._keys = app, keys
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = get_route_path(scope)  # as used for routing, without Ray Serve's prefix
        if path in _OPEN_TO_ALL:
            return await self._app(scope, receive, send)
        if path == "/metrics" and not self._keys.is_of_tenants:
            return await self._app(scope, receive, send)
        tenant = self._keys.find(_key(scope))
        if tenant is None:
            return await _refuse(_WRONG_KEY, scope, receive, send)
        if needed := _missing_right(path, tenant):
            return await _refuse(_no_right(tenant, needed), scope, receive, send)
        if tenant.max_requests and self._running[tenant.name] >= tenant.max_requests:
            return await _refuse(_too_many(tenant), scope, receive, send)
        self._running[tenant.name] += 1
        try:
            await self._app({**scope, _TENANT: tenant}, receive, send)
        finally:
            self._running[tenant.name] -= 1


def tenant_of(request: Request) -> Tenant:
    """The tenant of a request; without an API key file, the same for all."""
    found = request.scope.get(_TENANT, EVERYBODY)
    assert isinstance(found, Tenant)
    return found


def owned(body: Body, request: Request) -> Body:
    """The body as its tenant's: with the tenant's salt, and without repairs if the tenant has none."""
    tenant = tenant_of(request)
    without = {"cache_repairs": False} if isinstance(body, ChatBody) and not tenant.has_repairs else {}
    return body.model_copy(update={"cache_salt": tenant.salt(body.cache_salt), **without})


def check_operator(request: Request, config: Config) -> None:
    """Without API keys, accept only programs on this machine, and browsers' requests that no web page caused.

    The name of a web page's server may be made to lead here, and to a browser that page and this server are then one.
    So the server has to be called by its address or as localhost.

    Raises:
        ProblemError: 403.
    """
    if config.api_key or config.api_keys:
        return  # checked by Authentication
    if not _is_from_here(request):
        text = "without an API key, commands are accepted only from the server's own machine; set RAYCACHE_API_KEY"
    elif "origin" in request.headers:  # sent by a web page in a browser on this machine
        text = "commands from web pages need an API key"
    elif not _is_local(name := _host_name(request)):
        text = f"without an API key, use http://127.0.0.1 or http://localhost instead of the name {name!r}"
    else:
        return
    raise ProblemError(Problem(403, text, code="api_key_needed"))


def _host_name(request: Request) -> str:
    """Name or address by which the client calls this server, without the port; "" if the header is none."""
    sent = _HOST.fullmatch(request.headers.get("host", ""))
    return (sent[1] or sent[2]).lower() if sent else ""


def _is_local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or _is_address(name)


_WRONG_KEY = Problem(
    401,
    "the API key is missing or wrong; send the header Authorization: Bearer KEY, or x-api-key: KEY",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def _no_right(tenant: Tenant, needed: str) -> Problem:
    return Problem(403, f"the API key of {tenant.name!r} lacks the right {needed!r}", code="missing_right")


def _too_many(tenant: Tenant) -> Problem:
    text = f"{tenant.name!r} has reached its limit of {tenant.max_requests} concurrent requests; wait until one ends"
    return Problem(429, text, code="tenant_limit", headers={"Retry-After": "1"})


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    await problem_response(problem, scope)(scope, receive, send)


def _key(scope: Scope) -> bytes:
    """The bearer token in a request, else its header x-api-key, or empty."""
    headers = dict(reversed(scope["headers"]))  # the first of several counts
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    found: bytes = key if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return found.strip()


def _missing_right(path: str, tenant: Tenant) -> str:
    """The right that a path requires and the tenant lacks, or empty."""
    if path in _OPEN_TO_KEYS or path.startswith("/v1/") or ADMIN in tenant.rights:
        return ""
    if path == "/metrics":
        return "" if METRICS in tenant.rights else METRICS
    return ADMIN


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_from_here(request: Request) -> bool:
    if request.client is None:
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
