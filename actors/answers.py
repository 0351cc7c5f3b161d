"""Answers of actors, with Ray's errors by our names."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from raycache.errors import EngineStoppedError, RayCacheError


class ActorLostError(EngineStoppedError):
    """The actor died, or says nothing any more."""


async def answer(ref: Any, *, of: str, timeout_s: float | None) -> Any:
    """Wait for an answer in an event loop.

    Args:
        of: whom, for messages, such as "the engine actor".
        timeout_s: after which it counts as lost; None for never.
    Raises:
        ActorLostError: there will be none.
        RayCacheError: what was raised there.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except TimeoutError as error:
        raise ActorLostError(f"{of} has not answered for {timeout_s:.0f} s") from error
    except RayTaskError as error:
        raise ours(error) from error
    except (RayActorError, ActorUnschedulableError) as error:
        raise _died(error, of) from error


def answer_now(ref: Any, *, of: str, timeout_s: float) -> Any:
    """Wait for an answer in a thread; see `answer`."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise ActorLostError(f"{of} has not answered for {timeout_s:.0f} s") from error
    except RayTaskError as error:
        raise ours(error) from error
    except (RayActorError, ActorUnschedulableError) as error:
        raise _died(error, of) from error


def ours(error: RayTaskError) -> Exception:
    """The error that was raised there, if it is one that we raise on purpose."""
    return error.cause if isinstance(error.cause, RayCacheError) else error


def _died(error: RayError, of: str) -> ActorLostError:
    """One line: Ray adds the actor's ids, and the whole log of a constructor that failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return ActorLostError(f"{of} died: {text.partition(' Some common causes')[0]}")
