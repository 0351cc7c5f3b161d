"""GET /cache/achievable: what caches without limits, or of other sizes, would have reused of the same requests.

A tenant sees its own figures, a key with the right "admin" those of all, the curve over sizes and what doubling a tier
would give. The same figures are in /metrics and, in short, in /status.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import check_operator, tenant_of
from launch.http.keys import ADMIN
from launch.http.wire import ProblemError, json_response
from raycache.achievable.prefixes import ChainedDigests
from raycache.achievable.reuse import Reuse, ReuseWatch
from raycache.achievable.tiers import Capacity, by_size, by_tier
from raycache.api.engine import AsyncEngine
from raycache.api.prepare import Choice, Generation
from raycache.api.problem import Problem
from raycache.api.run import Follow
from raycache.cache.keys import chain_digests
from raycache.config import Config
from raycache.observe import figures
from raycache.observe.figures import Sample
from raycache.types import EngineInfo, EngineStats

ACHIEVABLE_PATH = "/cache/achievable"


class AchievableApi:
    """The endpoint, and the count of the requests of this process."""

    def __init__(self, engine: AsyncEngine, *, config: Config, info: EngineInfo) -> None:
        self._engine, self._config, self._info = engine, config, info
        self._reuse = _reuse(info) if config.prefix_cache else None

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [Route(ACHIEVABLE_PATH, self.show)]

    async def show(self, request: Request) -> Response:
        """Return the figures."""
        check_operator(request, self._config)
        if (reuse := self._reuse) is None:
            raise ProblemError(Problem(404, "the server runs without prefix cache, so nothing is reused"))
        tenant = tenant_of(request)
        if ADMIN not in tenant.rights:
            return json_response({"tenants": {tenant.name: reuse.tallies.facts(tenant.name)}})
        stats = await self._engine.stats()
        return json_response(
            {
                "total": reuse.tallies.total.facts(),
                "tenants": {name: tally.facts() for name, tally in sorted(reuse.tallies.tenants.items())},
                "tiers": by_tier(reuse, self._capacity(stats)),
                "curve": by_size(reuse),
                "sample": {"pages": len(reuse.sample), "one_in": round(reuse.sample.weight)},
            }
        )

    def follow(self, request: Request) -> Follow | None:
        """What counts the prompts of an HTTP request; None: they are not counted."""
        reuse, tenant = self._reuse, tenant_of(request).name
        if reuse is None:
            return None

        def begin(generation: Generation, choice: Choice) -> ReuseWatch | None:
            return reuse.follow(choice.request, tenant=tenant) if choice.is_first else None

        return begin

    def summary(self, stats: EngineStats) -> dict[str, Any]:
        """For /status: the figures of all tenants in short; empty before the first request."""
        if self._reuse is None or not self._reuse.tallies.total.requests:
            return {}
        facts = self._reuse.tallies.total.facts()
        lost: dict[str, float] = {}
        for row in facts["lost"]:
            lost[row["cause"]] = round(lost.get(row["cause"], 0.0) + row["share"], 5)
        gains = {tier: row["gain_if_doubled"] for tier, row in by_tier(self._reuse, self._capacity(stats)).items()}
        names = ("achieved", "achievable", "error")
        return {"reuse": {**{name: facts[name] for name in names}, "lost": lost, "gain_if_doubled": gains}}

    def samples(self, stats: EngineStats) -> Iterator[Sample]:
        """The metrics in figures.REUSE; may be read by another thread than the one that counts."""
        if (reuse := self._reuse) is None:
            return
        for name, tally in list(reuse.tallies.tenants.items()):
            yield Sample(figures.TENANT_PROMPT, (name,), tally.prompt)
            yield Sample(figures.TENANT_CACHED, (name,), tally.cached)
            yield Sample(figures.TENANT_NEW, (name,), tally.new)
            for cause, tokens in tally.most_lost().items():
                yield Sample(figures.TENANT_LOST, (name, cause), tokens)
        total = reuse.tallies.total
        if total.requests:
            yield Sample(figures.ACHIEVABLE, (), total.achievable)
            yield Sample(figures.ACHIEVABLE_ERROR, (), total.error)
            for tier, row in by_tier(reuse, self._capacity(stats)).items():
                yield Sample(figures.DOUBLING_GAIN, (tier,), row["gain_if_doubled"])

    def _capacity(self, stats: EngineStats) -> Capacity:
        return Capacity.of(self._info, stats, is_exclusive=self._config.write_policy == "write_back")


def _reuse(info: EngineInfo) -> Reuse:
    """Counts by the digests that prompts come with, where tiers need them."""
    size = info.page_size
    if not info.chained_weights:
        return Reuse(page_size=size)

    def extend(before: bytes, tokens: bytes) -> bytes:
        return chain_digests(before, tokens, first=0, stop=len(tokens) // (4 * size), page_size=size)

    return Reuse(page_size=size, source=ChainedDigests(extend))
