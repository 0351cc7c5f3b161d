"""Results of actor calls, with Ray's errors translated to RayCache's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError

from raycache.errors import EngineStoppedError, RayCacheError


class ActorLostError(EngineStoppedError):
    """The actor died, or no longer responds."""


async def answer(ref: Any, *, of: str, timeout_s: float | None) -> Any:
    """Await an actor call's result in an event loop.

    Args:
        of: name of the actor in messages, such as "the engine actor".
        timeout_s: after this time the actor counts as lost; None: never.
    Raises:
        ActorLostError: the actor died or timed out.
        RayCacheError: raised in the actor.
    """
    with _translated(of, timeout_s):
        async with asyncio.timeout(timeout_s):
            return await ref


def answer_now(ref: Any, *, of: str, timeout_s: float) -> Any:
    """Wait for an actor call's result in a thread; see `answer`."""
    with _translated(of, timeout_s):
        return ray.get(ref, timeout=timeout_s)


def ours(error: RayTaskError) -> Exception:
    """The RayCacheError raised in the actor, or None for any other error."""
    return error.cause if isinstance(error.cause, RayCacheError) else error


@contextmanager
def _translated(of: str, timeout_s: float | None) -> Iterator[None]:
    try:
        yield
    except RayTaskError as error:
        raise ours(error) from error
    except TimeoutError as error:  # also Ray's own, and not one raised in the actor: those are RayTaskErrors, too
        raise ActorLostError(f"{of} has not answered for {timeout_s:.0f} s") from error
    except (RayActorError, ActorUnschedulableError) as error:
        raise _died(error, of) from error


def _died(error: RayError, of: str) -> ActorLostError:
    """Shorten Ray's message to one line, without actor ids and the log of a failed constructor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return ActorLostError(f"{of} died: {text.partition(' Some common causes')[0]}")
