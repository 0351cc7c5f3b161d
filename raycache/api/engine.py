"""What the server asks of an engine.

Two implementations exist: over the engine actor of a Ray cluster, and in this process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from raycache.types import CacheCommand, EngineInfo, EngineStats, GenerateRequest, RequestOutput, StreamState


class AsyncEngine(Protocol):
    """An engine that runs requests concurrently; all methods belong to one event loop."""

    async def info(self) -> EngineInfo:
        """Facts of the engine.

        Raises:
            EngineStoppedError: it is stopped or has failed.
        """
        ...

    async def stats(self) -> EngineStats:
        """Counters and balances now.

        Raises:
            EngineStoppedError: it is stopped or has failed.
        """
        ...

    async def stream_states(self, request_ids: Sequence[str]) -> Mapping[str, StreamState]:
        """States of those of the requests that the engine has at the moment.

        Raises:
            EngineStoppedError: it is stopped or has failed.
        """
        ...

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        """Carry out an operator's command on the tiers of the cache, while requests run.

        Returns:
            Plain values. STATUS: {"tiers": {tier: {name: number}}, "warnings": [text]}. INSPECT: {"prompt_tokens": n,
            "tiers": {tier: prompt tokens that a hit would reach with it and those above}, "cut_by": component or "",
            "miss": Miss}. TREE: {"step": now, "tiers": {tier: see cache/survey.py}}. Others: what was done, such as
            {"checked": 512, "bad": 0}.
        Raises:
            ConfigError: it cannot be done; says what would work.
            EngineStoppedError: the engine is stopped or has failed.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and give its increments in order; the last one has a finish_reason.

        Closing the generator before that (aclose, or cancelling the task that awaits it) cancels the request.

        Raises:
            QueueFullError: too many requests wait. All errors are raised at the first iteration.
            RequestError: the request can never be served.
            EngineStoppedError: the engine is stopped or has failed.
        """
        ...
