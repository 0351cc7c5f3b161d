"""Handle to an engine actor: creates, calls and stops it, with timeouts and RayCache's own errors."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import ActorLostError, answer, answer_now
from actors.arena import Arenas
from actors.connection import Address, Connection
from actors.engine import HEARTBEAT_S, EngineActor, Message
from actors.placement import Placement
from raycache.config import Config
from raycache.errors import EngineStoppedError, RayCacheError
from raycache.types import CacheAction, CacheCommand, GenerateRequest

STOP_TIMEOUT_S = 15.0
_WATCH_S = 5.0
"""Length of a call that only tells whether the actor lives."""
_ANSWER_TIMEOUT_S = 60.0
"""For any reply; the actor has threads that do not wait for a step."""
_SILENT_S = HEARTBEAT_S + _ANSWER_TIMEOUT_S
"""After which a connection without messages counts as broken."""
_ENGINE = "the engine actor"


class EngineHandle:
    """Creates an engine actor; it starts ranks once Ray has ended those of its predecessor.

    Args:
        device: "cpu" or "cuda".
        epoch: epoch of the last gang before this engine's first.
        replica: name of the replica.
    """

    def __init__(
        self, config: Config, *, device: str, placement: Placement, arenas: Arenas, epoch: int, replica: str
    ) -> None:
        self.placement = placement
        options: dict[str, Any] = {
            "concurrency_groups": {"watch": 2, "ask": 3, "admin": 1, "flush": 2},
            # On the node of rank 0: its arena holds the catalog of the host tier.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(placement.nodes[0], soft=False),
            "enable_task_events": False,  # the watch makes a call every few seconds
        }
        kind: Any = ray.remote(num_cpus=0, max_restarts=0, **options)(EngineActor)
        self._actor = kind.remote(config, device, placement, arenas=arenas, epoch=epoch, replica=replica)
        self._connection = Connection()
        self._watching: asyncio.Task[None] | None = None

    def submit(self, request: GenerateRequest) -> None:
        """Send a request; `receive` returns its output."""
        self._connection.send(request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its pages are freed in the next step."""
        self._connection.send(request_id)

    async def receive(self) -> list[Message]:
        """Return new messages; waits up to a few seconds for the first one. For one task, in one event loop.

        Raises:
            ActorLostError: the engine died or does not respond.
            RayCacheError: the engine has failed permanently.
        """
        try:
            if not self._connection.is_open:
                await self._connect()
            received: list[Message] | RayCacheError = await self._connection.receive(timeout_s=_SILENT_S)
        except TimeoutError as cause:
            self._disconnect()
            raise ActorLostError(f"{_ENGINE} was silent for {_SILENT_S:.0f} s") from cause
        except OSError as cause:
            self._disconnect()
            await self.ask("progress")  # says more, if the actor died
            raise ActorLostError(f"the connection to {_ENGINE} broke, which Ray still reaches: {cause}") from cause
        except BaseException:
            self._disconnect()
            raise
        if isinstance(received, ActorLostError):
            raise received  # another engine may succeed
        if isinstance(received, RayCacheError):
            raise EngineStoppedError(str(received))
        return received

    async def admin(self, command: CacheCommand) -> dict[str, Any]:
        """Carry out the decider's part of an operator's command; a flush does not delay other commands."""
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
            ActorLostError: the engine died or does not respond.
            RayCacheError: raised by the method.
        """
        ref = getattr(self._actor, method).remote(*arguments)
        return await answer(ref, of=_ENGINE, timeout_s=_ANSWER_TIMEOUT_S)

    def ask_now(self, method: str, *, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """Like `ask`, but blocking: call it from a thread."""
        return answer_now(getattr(self._actor, method).remote(), of=_ENGINE, timeout_s=timeout_s)

    def stop(self) -> None:
        """Stop the engine and its ranks cleanly, so that they detach from the host tier; kill them after a timeout."""
        with contextlib.suppress(ActorLostError):
            answer_now(self._actor.stop.remote(STOP_TIMEOUT_S), of=_ENGINE, timeout_s=STOP_TIMEOUT_S + 5)
        self.kill()

    def kill(self) -> None:
        """Kill the engine; Ray then ends its ranks."""
        ray.kill(self._actor)

    async def _connect(self) -> None:
        address: Address = await self.ask("address", 0.0)
        try:
            await self._connection.open(address)
        except OSError as cause:
            await self.ask("progress")  # says more, if the actor died
            raise EngineStoppedError(
                f"cannot connect to {_ENGINE} at {address.host}, port {address.port}, though Ray reaches it: "
                f"{str(cause) or 'no answer'}; let the nodes reach each other on all ports"
            ) from cause
        self._watching = asyncio.create_task(self._watch())

    def _disconnect(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._connection.close()

    async def _watch(self) -> None:
        """Let `receive` fail once the actor has; a lost node closes no connection."""
        try:
            while True:
                await self.ask("address", _WATCH_S)
        except RayCacheError as error:
            self._connection.fail(error)
