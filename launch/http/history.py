"""GET /history: the last ten minutes of what /ui plots, so that a page shows what was before it was opened.

    every 5 s: EngineStats, lost tokens by cause -> ring of 120 samples -> GET /history

It begins with the first request to this process. A tenant sees what its own prompts lost, a key with the right "admin"
everything. The memory is bounded: each sample has five numbers and, for at most _MOST_TENANTS tenants, a number for
each of the causes in cause.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import check_operator, tenant_of
from launch.http.keys import ADMIN
from launch.http.wire import json_response
from raycache.api.engine import AsyncEngine
from raycache.config import Config
from raycache.errors import EngineStoppedError

HISTORY_PATH = "/history"
INTERVAL_S = 5.0
NUM_SAMPLES = 120
_MOST_TENANTS = 32
_TIMEOUT_S = 4.0
_FIGURES = ("steps", "running", "waiting", "prompt_tokens", "cached_tokens")

_log = logging.getLogger(__name__)
Lost = Mapping[str, Mapping[str, int]]
"""Tenant -> cause -> prompt tokens that were computed again."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment.

    Attributes:
        at_s: on the monotonic clock.
        figures: those of _FIGURES, as in EngineStats.
        lost: by cause, since the sample before; tenants: the same for the tenants that lost most.
    """

    at_s: float
    figures: tuple[int, ...]
    lost: dict[str, int]
    tenants: dict[str, dict[str, int]] = field(default_factory=dict)


class History:
    """The ring. Belongs to one thread.

    Args:
        lost: counts since the start.
    """

    def __init__(self, lost: Callable[[], Lost]) -> None:
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._lost = lost
        self._before = lost()

    def sample(self, figures: tuple[int, ...], *, now_s: float) -> None:
        """Add a sample; the oldest one goes."""
        lost = self._lost()
        self.samples.append(self._sample(figures, lost, now_s=now_s))
        self._before = lost

    def all(self, figures: tuple[int, ...], *, now_s: float) -> list[Sample]:
        """All samples, and one of now, which is not kept."""
        return [*self.samples, self._sample(figures, self._lost(), now_s=now_s)]

    def _sample(self, figures: tuple[int, ...], lost: Lost, *, now_s: float) -> Sample:
        gains = {tenant: _gains(causes, self._before.get(tenant, {})) for tenant, causes in lost.items()}
        total: dict[str, int] = {}
        for causes in gains.values():
            for cause, tokens in causes.items():
                total[cause] = total.get(cause, 0) + tokens
        most = sorted(
            (tenant for tenant, causes in gains.items() if causes), key=lambda name: -sum(gains[name].values())
        )
        return Sample(now_s, figures, total, {tenant: gains[tenant] for tenant in most[:_MOST_TENANTS]})


class HistoryApi:
    """The endpoint, and what keeps the ring.

    Args:
        lost: as `History`.
    """

    def __init__(self, engine: AsyncEngine, *, config: Config, lost: Callable[[], Lost]) -> None:
        self._engine, self._config = engine, config
        self._history = History(lost)
        self._keeping: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [Route(HISTORY_PATH, self.show)]

    def keep(self) -> None:
        """Take samples from now on, until the event loop ends; further calls have no effect."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.get_running_loop().create_task(self._keep(), context=Context())

    async def show(self, request: Request) -> Response:
        """Return the samples, the oldest first, and one of now."""
        check_operator(request, self._config)
        self.keep()
        tenant = tenant_of(request)
        figures = await self._figures()
        now_s = time.monotonic()
        samples = list(self._history.samples) if figures is None else self._history.all(figures, now_s=now_s)
        rows = [_row(each, tenant.name, is_admin=ADMIN in tenant.rights, now_s=now_s) for each in samples]
        return json_response({"interval_s": INTERVAL_S, "samples": rows})

    async def _keep(self) -> None:
        while True:
            figures = await self._figures()
            if figures is not None:
                self._history.sample(figures, now_s=time.monotonic())
            await asyncio.sleep(INTERVAL_S)

    async def _figures(self) -> tuple[int, ...] | None:
        """Figures of now; None if the engine does not reply, as while it is replaced."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                stats = await self._engine.stats()
        except (EngineStoppedError, TimeoutError) as error:
            _log.debug("no figures for the history: %s", error)
            return None
        return tuple(getattr(stats, name) for name in _FIGURES)


def _gains(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    gains = {cause: tokens - before.get(cause, 0) for cause, tokens in now.items()}
    return {cause: tokens for cause, tokens in gains.items() if tokens > 0}


def _row(sample: Sample, tenant: str, *, is_admin: bool, now_s: float) -> dict[str, Any]:
    age = {"age_s": round(max(0.0, now_s - sample.at_s), 3)}
    if not is_admin:
        return {**age, "lost_tokens": sample.tenants.get(tenant, {})}
    return {**age, **dict(zip(_FIGURES, sample.figures, strict=True)), "lost_tokens": sample.lost}
