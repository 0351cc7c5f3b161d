"""The part of an operator's command to the cache that the owner of the host tier does; the decider does the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raycache.host.service import HostService
from raycache.types import TIERS, CacheAction, CacheCommand

STORAGE_FIRST = (CacheAction.ATTACH, CacheAction.RESIZE, CacheAction.SCRUB)
"""Commands that the owner carries out before the decider: what the storage refuses must change nothing there."""


def is_for_storage(command: CacheCommand) -> bool:
    """Whether the owner has anything to do."""
    if command.kind is CacheAction.CLEAR:
        return "storage" in (command.tiers or TIERS)
    return command.kind in (*STORAGE_FIRST, CacheAction.DETACH)


def carry_out(command: CacheCommand, host: HostService) -> dict[str, Any]:
    """Do the owner's part of a command that `is_for_storage`.

    Returns:
        What was done, see `AsyncEngine.admin`.
    Raises:
        ConfigError: it cannot be done; says what would work.
    """
    match command.kind:
        case CacheAction.ATTACH:
            return {"storage": host.attach(command.url)}
        case CacheAction.DETACH:
            return {"detached": host.detach()}
        case CacheAction.RESIZE:
            host.resize(command.size)
            return {"bytes_limit": command.size}
        case CacheAction.SCRUB:
            return host.scrub(timeout_s=command.timeout_s or math.inf)
    host.clear()
    return {}


def with_storage(tiers: Mapping[str, Any], figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """Figures of the tiers, with those that the storage itself counts (`HostService.status`)."""
    if not figures:
        return tiers
    numbers = {name: float(value) for name, value in figures.items() if name != "name"}
    return {**tiers, "storage": {**tiers.get("storage", {}), **numbers}}
