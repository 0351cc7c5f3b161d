"""Operators' commands to the replicas of a service, from the bodies of POST /replicas/...

scale    {"count": 3}                 restart  {"drain_first": true}; without: a new one starts before one is drained
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from pydantic import Field

from raycache.api.schema import StrictBody, parse_body

MAX_REPLICAS = 1000


class ReplicaAction(StrEnum):
    """What an operator can do with the replicas."""

    STATUS = "status"
    SCALE = "scale"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class ReplicaCommand:
    """An operator's command.

    Attributes:
        kind: which.
        count: replicas that there shall be, for SCALE.
        drain_first: for RESTART: take an old one away before its successor starts, where there is no room for both.
    """

    kind: ReplicaAction
    count: int = 0
    drain_first: bool = False


class ReplicaSet(Protocol):
    """What carries out commands."""

    async def carry_out(self, command: ReplicaCommand) -> Mapping[str, Any]:
        """Carry out a command while requests run.

        Returns:
            {"wanted": n, "routing": policy, "replicas": [{"name", "state", "requests", "work_tokens"}]}; after SCALE
            and RESTART also {"started": [name], "drained": [{"name", "moved_requests", "saved": what FLUSH answers}]}.
        Raises:
            ConfigError: it cannot be done; says what would work.
        """
        ...


def parse_replica_command(action: ReplicaAction, body: Mapping[str, Any]) -> ReplicaCommand:
    """Read a command; STATUS has no body.

    Raises:
        RequestError: names the field.
    """
    match action:
        case ReplicaAction.SCALE:
            return ReplicaCommand(action, count=parse_body(_ScaleBody, body).count)
        case ReplicaAction.RESTART:
            return ReplicaCommand(action, drain_first=parse_body(_RestartBody, body).drain_first)
    return ReplicaCommand(action)


class _ScaleBody(StrictBody):
    count: int = Field(ge=1, le=MAX_REPLICAS)


class _RestartBody(StrictBody):
    drain_first: bool = False
