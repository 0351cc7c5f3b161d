"""A handle of one engine actor: how it is created, asked and ended, with deadlines and with our errors."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import ActorLostError, answer, answer_now
from actors.arena import Arenas
from actors.engine import EngineActor, Message
from actors.placement import Placement
from raycache.config import Config
from raycache.types import CacheAction, CacheCommand, GenerateRequest

STOP_TIMEOUT_S = 15.0
_POLL_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 60.0
"""For any answer; the actor has threads that do not wait for a step."""
_ENGINE = "the engine actor"


class EngineHandle:
    """Creates an engine actor, which has to wait until Ray has ended the ranks of the one before.

    Args:
        device: "cpu" or "cuda".
        epoch: see `EngineActor`.
        replica: name of this engine among others.
    """

    def __init__(
        self, config: Config, *, device: str, placement: Placement, arenas: Arenas, epoch: int, replica: str
    ) -> None:
        self.placement = placement
        options: dict[str, Any] = {
            # Submits and cancels stay in order; polls and questions do not wait for each other.
            "concurrency_groups": {"submit": 1, "poll": 1, "ask": 3, "admin": 1, "flush": 2},
            # With the first ranks: the catalog of the host tier is in the arena there.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(placement.nodes[0], soft=False),
            # Of its calls, a poll for every step, which Ray's GCS would gather by the ten thousand.
            "enable_task_events": False,
        }
        kind: Any = ray.remote(num_cpus=0, max_restarts=0, **options)(EngineActor)
        self._actor = kind.remote(config, device, placement, arenas=arenas, epoch=epoch, replica=replica)

    def submit(self, request: GenerateRequest) -> None:
        """Send a request; what comes of it is polled."""
        self._actor.submit.remote(request)

    def cancel(self, request_id: str) -> None:
        """End a request."""
        self._actor.cancel.remote(request_id)

    async def poll(self) -> list[Message]:
        """Wait some seconds for messages.

        Raises:
            ActorLostError: the engine died, or says nothing any more.
            RayCacheError: it has failed for good.
        """
        messages: list[Message] = await self.ask("poll", _POLL_TIMEOUT_S)
        return messages

    async def admin(self, command: CacheCommand) -> dict[str, Any]:
        """Have the decider's part of an operator's command done; a flush does not keep others waiting."""
        ref = self._actor.admin
        if command.kind is CacheAction.FLUSH:
            ref = ref.options(concurrency_group="flush")
        done: dict[str, Any] = await answer(
            ref.remote(command), of=_ENGINE, timeout_s=_ANSWER_TIMEOUT_S + command.timeout_s
        )
        return done

    async def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of `EngineActor`.

        Raises:
            ActorLostError: there is no answer.
            RayCacheError: what was raised there.
        """
        ref = getattr(self._actor, method).remote(*arguments)
        return await answer(ref, of=_ENGINE, timeout_s=_ANSWER_TIMEOUT_S)

    def ask_now(self, method: str, *, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """The same, from a thread."""
        return answer_now(getattr(self._actor, method).remote(), of=_ENGINE, timeout_s=timeout_s)

    def stop(self) -> None:
        """End engine and ranks in good order, so that the ranks let go of the host tier, or else kill the engine."""
        with contextlib.suppress(ActorLostError):
            answer_now(self._actor.stop.remote(STOP_TIMEOUT_S), of=_ENGINE, timeout_s=STOP_TIMEOUT_S + 5)
        self.kill()

    def kill(self) -> None:
        """End the engine at once; Ray ends its ranks."""
        ray.kill(self._actor)
