"""GET /cache/tree: the largest cached prefixes of each tier, and the sum of the rest.

A tenant sees its own prefixes, a key with the right "admin" the sizes of all. Text is shown of prefixes that the caller
could have sent itself without a `cache_salt`; of others, sizes only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import check_operator, tenant_of
from launch.http.keys import ADMIN, Keys
from launch.http.wire import json_response, number
from raycache.api.engine import AsyncEngine
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError, RequestError
from raycache.types import CacheAction, CacheCommand, EngineInfo, TreeQuery

TREE_PATH = "/cache/tree"
_TIMEOUT_S = 30.0
_FRESH_S = 2.0
"""Callers that ask for the same within this time get the same answer."""
_MOST_NAMED = 256
_MOST_CHARS = 160
_LIMITS = {"limit": (200, 1000), "depth": (6, 32)}
"""Query parameter -> (default, maximum)."""

_Key = tuple[TreeQuery, str]


class TreeApi:
    """The endpoint.

    Args:
        keys: whose tenants are named; None: there are none.
    """

    def __init__(
        self, engine: AsyncEngine, *, config: Config, info: EngineInfo, tokenizer: Tokenizer, keys: Keys | None
    ) -> None:
        self._engine, self._config, self._info, self._tokenizer, self._keys = engine, config, info, tokenizer, keys
        self._one_at_a_time = asyncio.Lock()
        self._answers: dict[_Key, tuple[float, dict[str, Any]]] = {}

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [Route(TREE_PATH, self.show)]

    async def show(self, request: Request) -> Response:
        """Return the prefixes of one replica, by default the first."""
        check_operator(request, self._config)
        replicas = list((await self._engine.stats()).replicas)
        replica = request.query_params.get("replica") or next(iter(replicas), "")
        key = (self._query(request), replica)
        async with self._one_at_a_time:
            now_s = time.monotonic()
            self._answers = {k: v for k, v in self._answers.items() if now_s - v[0] < _FRESH_S}
            if key not in self._answers:
                self._answers[key] = (now_s, await self._ask(*key))
            answer = self._answers[key][1]
        return json_response({**answer, "replica": replica, "replicas": replicas})

    def _query(self, request: Request) -> TreeQuery:
        own = tenant_of(request)
        is_all = ADMIN in own.rights
        tenants = [own, *(self._keys.tenants() if self._keys is not None and is_all else ())]
        named = {tenant.salt(""): tenant.name for tenant in tenants[:_MOST_NAMED]}
        params = request.query_params
        limit, depth = (number(params, name, default=low, most=most) for name, (low, most) in _LIMITS.items())
        return TreeQuery(limit, depth, tuple(named.items()), is_all)

    async def _ask(self, query: TreeQuery, replica: str) -> dict[str, Any]:
        command = CacheCommand(CacheAction.TREE, tree=query, timeout_s=_TIMEOUT_S, replica=replica)
        try:
            found = await self._engine.admin(command)
        except ConfigError as refusal:
            raise RequestError(str(refusal), field="replica") from refusal
        tiers = found["tiers"]
        await asyncio.to_thread(self._put_texts, list(tiers.values()))
        return {
            "step": found["step"],
            "page_tokens": self._info.page_size,
            "tiers": {tier: {"page_bytes": self._page_bytes(tier), **tree} for tier, tree in tiers.items()},
        }

    def _put_texts(self, waiting: list[dict[str, Any]]) -> None:
        """Replace the token ids that may be shown by their text."""
        while waiting:
            prefix = waiting.pop()
            waiting += prefix["prefixes"]
            if "head" in prefix:
                text = self._tokenizer.decode(prefix.pop("head"), skip_special_tokens=False)
                prefix["text"] = text[:_MOST_CHARS]

    def _page_bytes(self, tier: str) -> int | None:
        """Bytes of a page over all ranks, without windows and states."""
        facts: Mapping[str, Any] = self._info.tiers.get(tier, {})
        pages = facts.get("tokens", 0) // self._info.page_size
        return facts["components"]["full"] // pages if pages and "components" in facts else None
